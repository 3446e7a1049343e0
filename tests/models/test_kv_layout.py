"""Layers that look back equally far share KV blocks, in groups of one size."""

from __future__ import annotations

import pytest

from lmkit.models.kv_layout import KVClass, kv_layout


@pytest.mark.parametrize(
    ("windows", "classes", "num_layers"),
    [
        ([0] * 4, (KVClass(),), 4),
        ([8] * 3, (KVClass(8, 2),), 3),
        ([8, 0] * 13, (KVClass(), KVClass(8, 2)), 13),
        (([8] * 5 + [0]) * 4, (KVClass(), KVClass(8, 2, 5)), 4),
        ([8, 8, 0], (KVClass(), KVClass(8, 2, 2)), 1),
        ([0, 8, 8, 9, 9, 9, 9, 0], (KVClass(), KVClass(8, 2), KVClass(9, 2, 2)), 2),
    ],
)
def test_groups_are_as_large_as_they_can_be(windows: list[int], classes: object, num_layers: int) -> None:
    layout = kv_layout(windows, 2, ["k"] * len(windows))
    assert layout.classes == classes
    assert {len(group) for group in layout.groups} == {num_layers}
    assert sorted(layer for group in layout.groups for layer in group) == list(range(len(windows)))
    of_groups = [of.window for of in layout.classes for _ in range(of.num_groups)]
    for layer, (group, place) in enumerate(layout.places()):
        assert layout.groups[group][place] == layer
        assert of_groups[group] == windows[layer]


def test_layers_of_one_place_are_of_one_kind() -> None:
    kinds = ["a", "b", "a", "a", "b", "a", "a", "b", "a"]  # two a and a b in each group
    layout = kv_layout([0, 0, 0, 8, 8, 8, 8, 8, 8], 0, kinds)
    assert layout.classes == (KVClass(), KVClass(8, 0, 2))
    assert {tuple(kinds[layer] for layer in group) for group in layout.groups} == {("a", "a", "b")}


@pytest.mark.parametrize(("windows", "window"), [([0, 8, 8], 0), ([4, 8, 8], 8)])
def test_kinds_in_other_proportions_form_one_group_that_keeps_what_any_layer_sees(
    windows: list[int], window: int
) -> None:
    layout = kv_layout(windows, 3, ["a", "b", "b"])
    assert layout.classes == (KVClass(window, 3 if window else 0),)
    assert layout.groups == ((0, 1, 2),)
