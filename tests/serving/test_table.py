"""The iteration table and the views of answers."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rich.console import Console

from batch_manager.iteration_table import IterationRow
from batch_manager.plan import Phase
from executor.cli.answers import AnswerLines, LiveAnswers, OneAnswer, answer_view
from executor.cli.table import AlikeIterations, group_iterations, iteration_table, requests_per_iteration, write_csv


def context(iteration: int, request: int, tokens: int = 8) -> IterationRow:
    return IterationRow(iteration, request, Phase.CONTEXT, 0, tokens, 0, tokens, 1)


def generation(iteration: int, request: int) -> IterationRow:
    return IterationRow(iteration, request, Phase.GENERATION, 8 + iteration, 9 + iteration, 0, 1, 1)


ROWS = [
    context(0, 1),
    generation(1, 1),
    context(1, 2),
    *(generation(iteration, request) for iteration in range(2, 7) for request in (1, 2)),
    generation(7, 2),
]


def drawn(rows: list[IterationRow], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(iteration_table(rows))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_iterations_alike_are_one_line_and_all_others_are_whole() -> None:
    groups = list(group_iterations(ROWS))
    assert [len(group) for group in groups if isinstance(group, list)] == [1, 2, 2, 1]
    assert [group for group in groups if isinstance(group, AlikeIterations)] == [AlikeIterations(3, 6, 2)]


def test_no_row_is_lost_in_groups() -> None:
    total = 0
    for group in group_iterations(ROWS):
        if isinstance(group, AlikeIterations):
            total += (group.last - group.first + 1) * group.num_requests
        else:
            total += len(group)
    assert total == len(ROWS)


def test_the_table_shows_every_column_in_80_columns() -> None:
    text = drawn(ROWS)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    heading = "".join(text.split("─")[0].split())
    for part in ("iteration", "request", "phase", "blocks", "with_spec", "scheduled_", "computed_", "reused_"):
        assert part in heading


def test_an_iteration_of_both_phases_is_marked_and_counted() -> None:
    text = drawn(ROWS)
    assert "* 1" in text
    assert "8 iterations; 1 with context and generation requests together (*)" in text


def test_a_table_without_rows_is_drawn() -> None:
    assert "0 iterations" in drawn([])


def test_the_csv_file_has_every_row(tmp_path: Path) -> None:
    write_csv(ROWS, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == [
        "iteration",
        "request",
        "phase",
        "num_computed_tokens",
        "num_tokens_with_spec",
        "reused_tokens",
        "num_scheduled_tokens",
        "blocks",
    ]
    assert len(rows) == len(ROWS)
    assert rows[2] == ["1", "2", "context", "0", "8", "0", "8", "1"]


def test_requests_per_iteration_is_the_mean_batch() -> None:
    assert requests_per_iteration(ROWS) == len(ROWS) / 8
    assert requests_per_iteration([]) == 0


def shown(terminal: bool, labels: list[str], pieces: list[tuple[int, str]]) -> str:
    console = Console(file=io.StringIO(), width=40, height=12, force_terminal=terminal, color_system=None)
    with answer_view(console, labels) as view:
        for index, text in pieces:
            view.add(index, text)
        for index in range(len(labels)):
            view.finish(index, "LENGTH")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_away_from_a_terminal_answers_are_numbered_lines() -> None:
    assert isinstance(answer_view(Console(file=io.StringIO()), ["a", "b"]), AnswerLines)
    text = shown(False, ["a", "b"], [(0, "one\ntw"), (1, "[red]"), (0, "o")])
    assert text.splitlines() == ["[0] one", "[0] two", "[0] -- LENGTH", "[1] [red]", "[1] -- LENGTH"]


def test_long_text_is_broken_between_words_and_nothing_is_lost() -> None:
    words = " ".join(f"word{number}" for number in range(60))
    lines = shown(False, ["a", "b"], [(0, words[:100]), (0, words[100:])]).splitlines()
    said = [line.removeprefix("[0] ") for line in lines if line.startswith("[0] ") and "--" not in line]
    assert " ".join(said) == words
    assert max(map(len, said)) <= 96


def test_on_a_terminal_every_answer_is_shown_whole_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(answer_view(console, ["a", "b"]), LiveAnswers)
    text = shown(True, ["first question", "second"], [(0, "yes [red]"), (1, "no")])
    assert "first question" in text
    assert "yes [red]" in text.split("first question")[-1]
    assert "(LENGTH)" in text


def test_a_single_answer_is_its_text_and_nothing_else() -> None:
    assert isinstance(answer_view(Console(file=io.StringIO()), ["a"]), OneAnswer)
    assert shown(False, ["a"], [(0, "he"), (0, "llo")]) == "hello\n"
