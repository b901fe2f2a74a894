"""`suggest_plan` pairs linear layers by the flow of the data, whatever they are called, and never takes a guess."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import tpplan
from tests.models.mixed_draws import mixed_draws
from tests.models.tiny import tiny_model
from tpplan.api import suggest_text

WIDTH, HEADS, FEED = 24, 4, 40


class Attention(nn.Module):
    """Names that say nothing, or the wrong thing: `down_proj` is a query."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj, self.b, self.c, self.q_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.down_proj, self.b, self.c))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.q_proj(mixed)


class Biased(nn.Module):
    """Scores with a bias for each head and distance, from a table that is looked up without data."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.distances = nn.Embedding(16, HEADS)
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        places = torch.arange(length, device=x.device)
        bias = self.distances((places[:, None] - places[None, :]).abs()).permute(2, 0, 1)
        mixed = F.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class Cosine(nn.Module):
    """Scores of directions, by a temperature for each head that is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heat, self.heads = nn.Parameter(torch.rand(HEADS, 1, 1)), HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.heat.clamp(max=0.8).exp()
        return x + self.o((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Both halves of a gated layer in one projection; between up and down stands a softmax where `mixed`."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * FEED)
        self.between = nn.Softmax(-1) if mixed else nn.Identity()
        self.out = nn.Linear(FEED, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.out(self.between(F.silu(gate) * up))


class Tokens(nn.Module):
    """A table of tokens that is tied to the head, one of positions, and a chain of three layers in two blocks."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(Attention(), Gated()) for _ in range(2))
        self.end = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.end(x))


IDS = {"ids": torch.zeros(3, 8, dtype=torch.long, device="meta")}
STREAM = {"x": torch.zeros(3, 8, WIDTH, device="meta")}


def styles(plan: tpplan.Plan) -> dict[str, str]:
    return {rule.pattern.text: rule.style.value for rule in plan.rules}


def test_roles_follow_the_data_and_not_the_names() -> None:
    plan = tpplan.suggest_plan(Attention(), tp=2, inputs=STREAM)
    assert styles(plan) == {"{down_proj,b,c}": "colwise", "q_proj": "rowwise"}


def test_a_whole_model_in_patterns() -> None:
    plan = tpplan.suggest_plan(Tokens(), tp=2, sequence_parallel=True, inputs=IDS)
    assert styles(plan) == {
        "words": "vocab",
        "head": "colwise",
        "blocks.*.*.{down_proj,b,c}": "colwise",
        "blocks.*.*.q_proj": "rowwise",
        "blocks.*.*.norm": "sequence",
        "blocks.*.*.both": "colwise",
        "blocks.*.*.out": "rowwise",
        "end": "sequence",
    }
    head = next(rule for rule in plan.rules if rule.pattern.text == "head")
    both = next(rule for rule in plan.rules if rule.packed)
    assert head.output == "replicate" and [pack.name for pack in both.packed or ()] == ["gate", "up"]


def test_a_table_of_biases_by_head_goes_with_the_heads() -> None:
    plan = tpplan.suggest_plan(Biased(), tp=2, inputs=STREAM)
    assert styles(plan) == {"{q,k,v}": "colwise", "o": "rowwise", "distances": "replicate"}
    assert next(rule for rule in plan.rules if rule.pattern.text == "distances").output == "shard"
    report = tpplan.verify(Biased(), plan, tp=2, inputs=STREAM)
    assert report.ok, report


def test_a_bounded_temperature_by_head_goes_with_the_heads() -> None:
    model = Cosine().double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    plan = tpplan.suggest_plan(model, 2, False, (x,))
    assert styles(plan)["{q,k,v,heat}"] == "colwise"
    assert tpplan.verify(model, plan, 2, (x,)).ok


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sequence", [False, True])
def test_the_suggestion_is_proved_and_right(sequence: bool) -> None:
    plan = tpplan.suggest_plan(Tokens(), tp=4, sequence_parallel=sequence, inputs=IDS)
    report = tpplan.verify(Tokens(), plan, tp=4, inputs=IDS)
    assert report.ok, report


@pytest.mark.parametrize("name", ["functional", "one dropout in two places"])
def test_dropouts_of_features_and_of_the_stream_in_one_body_are_no_obstacle(name: str) -> None:
    model, rules, inputs = mixed_draws(name)
    assert styles(tpplan.suggest_plan(model, tp=2, inputs=inputs)) == rules["modules"]


def test_a_product_that_stays_whole_has_its_reason_too() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ self.up, -1) @ self.down

    text = suggest_text(nn.Sequential(Attention(), Bare()), 2, inputs={"input": STREAM["x"]})
    words = " ".join(text.replace("#", " ").split())
    assert "softmax" in words
    assert "aren't those of a linear layer" not in words


def test_a_layer_that_reads_what_stays_whole_names_that_alone() -> None:
    """The head reads a stream to which layers add that are split."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.stem = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2), nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.Sequential(nn.LayerNorm(WIDTH), Attention(), Gated(), Attention(), Gated())
            self.end, self.score = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(self.conv(x.transpose(1, 2)).transpose(1, 2))
            return self.score(self.end(self.blocks(y))[:, 0])

    text = suggest_text(Headed(), 2, inputs=STREAM).partition("version:")[0]
    words = " ".join(text.replace("#", " ").split())
    assert "conv (" in words and "its channels stay whole" in words
    assert "score (" in words and "`stem`, which stays whole" in words
    assert "blocks." not in words.partition("score (")[2]


def test_what_needs_all_features_stays_whole_with_the_reason() -> None:
    model = nn.Sequential(Attention(), Gated(mixed=True))
    text = suggest_text(model, 2, inputs={"input": STREAM["x"]})
    assert styles(tpplan.load_plan(text)).keys() == {"*.{down_proj,b,c}", "*.q_proj"}
    words = " ".join(text.replace("#", " ").split())
    assert "*.both" in words
    assert "needs its result whole" in words and "softmax" in words


@pytest.mark.sweep
def test_the_text_loads_to_an_equal_plan_each_time() -> None:
    model, inputs = tiny_model("llama", device="meta")
    first, second = (suggest_text(model, 2, True, inputs) for _ in range(2))
    assert first == second
    assert tpplan.load_plan(first) == tpplan.suggest_plan(model, 2, True, inputs)
    assert "Sharded: 99." in first


def test_heads_that_don_t_divide_are_shared_out_whole() -> None:
    inputs = {"x": torch.randn(3, 9, WIDTH, dtype=torch.float64)}
    model = Attention().double()
    plan = tpplan.suggest_plan(model, tp=3, inputs=inputs)
    assert styles(plan) == {"{down_proj,b,c}": "colwise", "q_proj": "rowwise"}
    assert tpplan.verify(model, plan, 3, inputs).ok


@pytest.mark.parametrize("size", [5, 6, 8])
def test_more_ranks_than_heads_are_refused_and_a_number_named_that_works(size: int) -> None:
    inputs = {"x": torch.zeros(3, 9, WIDTH, device="meta")}
    with pytest.raises(tpplan.CompileError, match="TP123") as caught:
        tpplan.suggest_plan(Attention(), tp=size, inputs=inputs)
    (finding,) = caught.value.diagnostics
    assert f"nothing in `Attention` can be sharded over {size} ranks" in finding.message and finding.notes
    assert "over 4 of them" in (finding.help or "")
    assert tpplan.suggest_plan(Attention(), tp=4, inputs=inputs).rules


def test_a_model_that_doesn_t_run_is_one_finding() -> None:
    with pytest.raises(tpplan.CompileError, match="TP110"):
        tpplan.suggest_plan(Attention(), tp=2, inputs={"x": torch.zeros(3, 8, WIDTH + 1, device="meta")})


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(tpplan.CompileError, match="none of its modules is a linear layer"):
        tpplan.suggest_plan(nn.LayerNorm(WIDTH), tp=2, inputs={"input": STREAM["x"]})


class Softened(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


def softened(layer: nn.Module) -> nn.Module:
    return register_parametrization(layer, "weight", Softened())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrap", [weight_norm, softened])
@pytest.mark.parametrize("tp", [2, 4])
def test_computed_weights_are_split(wrap: Any, tp: int) -> None:
    model = nn.Sequential(wrap(nn.Linear(16, 32)), nn.ReLU(), wrap(nn.Linear(32, 16))).double()
    call = (torch.randn(3, 16, dtype=torch.float64),)
    plan = tpplan.suggest_plan(model, tp=tp, inputs=call)
    assert {(str(rule.pattern), str(rule.style)) for rule in plan.rules} == {("0", "colwise"), ("2", "rowwise")}
    report = tpplan.verify(model, plan, tp, call)
    assert report.ok, report.problems


def test_computed_convolutions_are_split() -> None:
    channelwise = weight_norm(nn.Conv1d(32, 32, 3, groups=32))
    layers = weight_norm(nn.Conv1d(16, 32, 3)), channelwise, weight_norm(nn.ConvTranspose1d(32, 16, 3))
    model, call = nn.Sequential(*layers).double(), (torch.randn(3, 16, 8, dtype=torch.float64),)
    plan = tpplan.suggest_plan(model, tp=2, inputs=call)
    assert {(str(rule.pattern), str(rule.style)) for rule in plan.rules} == {("{0,1}", "colwise"), ("2", "rowwise")}
    report = tpplan.verify(model, plan, 2, call)
    assert report.ok, report.problems


def test_heads_of_computed_weights_are_gathered() -> None:
    model = nn.Sequential()
    model.up, model.down, model.head = nn.Linear(16, 32), nn.Linear(32, 16), weight_norm(nn.Linear(16, 64))
    call = (torch.randn(3, 16, dtype=torch.float64),)
    plan = tpplan.suggest_plan(model.double(), tp=2, inputs=call)
    assert [(str(rule.style), str(rule.output)) for rule in plan.rules if str(rule.pattern) == "head"] == [
        ("colwise", "replicate")
    ]
    report = tpplan.verify(model, plan, 2, call)
    assert report.ok, report.problems


def test_a_weight_that_can_only_be_computed_whole_is_the_cause_that_is_told() -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(16, 32)), nn.ReLU(), spectral_norm(nn.Linear(32, 16)))
    with pytest.raises(tpplan.CompileError, match=r"`0\.weight` isn't a parameter: .* `_SpectralNorm`"):
        tpplan.suggest_plan(model, tp=2, inputs=(torch.randn(3, 16),))


class Spectral(nn.Module):
    """A long convolution by Fourier transforms along the sequence, with a filter for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEED), nn.Linear(FEED, WIDTH)
        self.filter, self.skip = nn.Parameter(torch.randn(FEED, 8)), nn.Parameter(torch.randn(FEED))

    def forward(self, x: Tensor) -> Tensor:
        u, length = self.up(x).transpose(1, 2), x.shape[1]
        made = torch.fft.rfft(u, 2 * length) * torch.fft.rfft(self.filter[:, :length], 2 * length)
        y = torch.fft.irfft(made, 2 * length)[..., :length] + u * self.skip[:, None]
        return x + self.down(F.gelu(y).transpose(1, 2))


@pytest.mark.parametrize("tp", [2, 4])
def test_filters_of_split_features_are_split_through_their_transform(tp: int) -> None:
    model, x = Spectral().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    plan = tpplan.suggest_plan(model, tp, False, (x,))
    assert styles(plan) == {"{up,filter,skip}": "colwise", "down": "rowwise"}
    assert tpplan.verify(model, plan, tp, (x,)).ok


class Joined(nn.Module):
    """A cache's first update: the features are put behind a vector of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x).relu()
        return self.down(torch.cat([made.new_empty(0), made], -2))


def test_a_vector_of_nothing_is_joined_to_features() -> None:
    text = suggest_text(nn.Sequential(Joined()), 2, inputs={"input": torch.randn(2, 5, 16)})
    assert '"*.up": colwise' in text and '"*.down": rowwise' in text
