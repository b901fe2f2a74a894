"""Codes of what can be wrong with a plan by itself."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import Entry, Severity

PLAN_CODES: Final[tuple[Entry, ...]] = (
    Entry("TP001", "yaml-syntax", Severity.ERROR, "The file isn't valid YAML."),
    Entry("TP002", "duplicate-key", Severity.ERROR, "A key stands twice in one mapping."),
    Entry("TP003", "unknown-key", Severity.ERROR, "A key that the plan language doesn't know."),
    Entry("TP004", "wrong-type", Severity.ERROR, "A value of the wrong type, such as a list where a mapping belongs."),
    Entry("TP005", "unknown-style", Severity.ERROR, "A style that doesn't exist."),
    Entry(
        "TP006", "unsupported-version", Severity.ERROR, "A version of the plan language that this tpplan doesn't read."
    ),
    Entry("TP007", "missing-key", Severity.ERROR, "A key that has to be there is missing."),
    Entry("TP008", "empty-pattern", Severity.ERROR, "A rule without a pattern."),
    Entry("TP009", "bad-pattern", Severity.ERROR, "A pattern that can't be read."),
    Entry("TP010", "extends-not-found", Severity.ERROR, "The plan named by `extends` doesn't exist."),
    Entry("TP011", "extends-cycle", Severity.ERROR, "A plan extends itself, directly or through others."),
    Entry("TP012", "unmatched-pattern", Severity.ERROR, "A pattern that matches no module."),
    Entry(
        "TP013", "ambiguous-rules", Severity.ERROR, "Two equally specific rules want different things of one module."
    ),
    Entry("TP014", "shadowed-rule", Severity.WARNING, "A rule that takes effect nowhere."),
    Entry("TP015", "file-too-large", Severity.ERROR, "The file is larger than any plan needs to be."),
    Entry("TP016", "too-many-aliases", Severity.ERROR, "The file's aliases or nesting expand beyond the limit."),
    Entry("TP017", "not-utf8", Severity.ERROR, "The file isn't UTF-8 text."),
    Entry("TP018", "yaml-tag", Severity.ERROR, "A YAML tag; a plan is plain data."),
    Entry("TP019", "file-not-readable", Severity.ERROR, "The file can't be read."),
    Entry("TP020", "option-not-for-style", Severity.ERROR, "An option that means nothing for the rule's style."),
    Entry("TP021", "invalid-value", Severity.ERROR, "A value of the right type that can't be meant."),
)
