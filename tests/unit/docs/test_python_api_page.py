"""The tables of docs/python_api.md have every public name and signature as in the code."""

from __future__ import annotations

from tools.write_python_api_docs import PAGE, first_sentence, methods_of, page


class Example:
    """Has a | in it."""

    def call(self, one: int, *, two: str | None = None) -> None:
        """Does ``this``,
        on two lines.

        And more.
        """

    def _hidden(self) -> None: ...


def test_a_table_names_each_public_method_with_its_parameters_and_first_sentence() -> None:
    assert list(methods_of(Example)) == [("call(one, *, two=None)", "Does `this`, on two lines.")]
    assert first_sentence(Example) == "Has a \\| in it."


def test_the_tables_are_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/write_python_api_docs.py"
