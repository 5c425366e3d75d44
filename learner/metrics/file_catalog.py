"""Metrics of trainings on rows of files, beside those in `catalog` that every training has."""

from typing import Final

from slipstream.learner.metrics.catalog import Kind, Metric

FILE_STEP: Final = (
    Metric(("epoch",), "", "passes over the training rows so far; with weights, over as many rows"),
    Metric(("rows",), "rows", "of the step, without those left out"),
    Metric(
        ("rows_dropped/<reason>",),
        "rows",
        "of the step, left out: `malformed`, `too_long` (`max_tokens`), `no_target` (no token in the loss), `template` "
        "(the chat template fails, or an answer's tokens can't be told), `images`",
    ),
    Metric(("terms",), "", "what the loss is a mean of: of `sft` the tokens in the loss"),
    Metric(("validation_s",), "s", "measurement on the validation rows, in steps that have one"),
)
FILE_EVAL: Final = (
    Metric(("loss",), "", "mean over the terms of all validation rows"),
    Metric(("rows",), "rows", "validation rows, without those left out"),
    Metric(("terms",), "", "what the loss is a mean of"),
)
FILE_SUMMARY: Final = (
    Metric(("trainer",), "", "kind of the training"),
    Metric(("epochs",), "", "passes over the training rows"),
    Metric(("loss_first", "loss_last"), "", "mean loss of the first and of the last 10 steps, of a third at most"),
    Metric(
        ("validation_loss_first", "validation_loss_last", "validation_loss_best"),
        "",
        "of the measurements before the first and after the last step, and the least of all; null without",
    ),
    Metric(("validation_last.<metric>",), "", "all metrics of the last measurement; null without"),
    Metric(("rows_trained",), "rows", "of all steps, repetitions in further epochs included"),
    Metric(("rows_dropped.<reason>",), "rows", "left out, by reason, as of the steps"),
)
FILE_CATALOG: Final[dict[Kind, tuple[Metric, ...]]] = {
    "step": FILE_STEP,
    "eval": FILE_EVAL,
    "summary": FILE_SUMMARY,
}
