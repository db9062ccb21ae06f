"""What users were promised has tests."""

from __future__ import annotations

import tested


def test_every_command_method_task_engine_and_way_to_train_is_named_in_a_test() -> None:
    code = tested.tests()
    assert [name for names in tested.things().values() for name in names if not tested.of(name, code)] == []
    assert tested.of("x" * 9, code) == []
