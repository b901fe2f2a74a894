"""All models of the zoo from outside of transformers' text models, by name."""

from __future__ import annotations

from tests.zoo.diffusing import DIFFUSING
from tests.zoo.hearing import HEARING
from tests.zoo.multimodal import MULTIMODAL, build
from tests.zoo.packages import PACKAGES
from tests.zoo.picturing import PICTURING
from tests.zoo.plain import PLAIN
from tests.zoo.seeing import SEEING
from tests.zoo.subject import Subject


def _reading(name: str) -> Subject:
    """A model whose Python reads numbers of its inputs."""
    return Subject(lambda: build(name).float(), MULTIMODAL[name].inputs)


READING = {name: _reading(name) for name in MULTIMODAL}
FAMILIES: dict[str, dict[str, Subject]] = {
    "pictures and videos": SEEING,
    "sounds and series": HEARING,
    "text with pictures or sounds": PICTURING,
    "pictures whose numbers steer": READING,
    "diffusers": DIFFUSING,
    "other packages": PACKAGES,
    "plain torch": PLAIN,
}
SUBJECTS: dict[str, Subject] = {name: held for family in FAMILIES.values() for name, held in family.items()}
