"""Dataclasses from JSON: what was written comes back, and anything else is refused by the field's path."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_build.checkpoint.model_config import ModelConfig, RopeScaling
from engine_build.dataclass_json import DecodeError, decode
from engine_build.manifest import BuildConfig, FileRecord, Manifest, TensorRtConfig, TensorSpec


@dataclass(frozen=True)
class _Inner:
    size: int


@dataclass(frozen=True)
class _Outer:
    inner: _Inner
    names: tuple[str, ...]
    sizes: dict[str, int]
    ratio: float
    flag: bool
    maybe: _Inner | None
    either: int | str


_GOOD = {
    "inner": {"size": 1},
    "names": ["a"],
    "sizes": {"x": 2},
    "ratio": 0.5,
    "flag": True,
    "maybe": None,
    "either": "s",
}

_sizes = st.integers(0, 1 << 40)
_names = st.text(max_size=8)
_manifests = st.builds(
    Manifest,
    format_version=_sizes,
    builder_versions=st.dictionaries(_names, _names, max_size=3),
    target=_names,
    pretrained_config=st.builds(
        ModelConfig,
        norm_epsilon=st.floats(allow_nan=False, allow_infinity=False),
        rope_theta=st.floats(allow_nan=False, allow_infinity=False),
        rope_scaling=st.none()
        | st.builds(
            RopeScaling,
            factor=st.just(8.0),
            low_freq_factor=st.just(1.0),
            high_freq_factor=st.just(4.0),
        ),
        eos_token_ids=st.lists(_sizes, max_size=3).map(tuple),
    ),
    build_config=st.builds(
        BuildConfig,
        tensorrt=st.none() | st.builds(TensorRtConfig, compute_capabilities=st.lists(_names, max_size=2).map(tuple)),
    ),
    inputs=st.dictionaries(
        _names, st.builds(TensorSpec, shape=st.lists(_sizes | _names, max_size=3).map(tuple)), max_size=2
    ),
    outputs=st.just({}),
    files=st.dictionaries(_names, st.builds(FileRecord), max_size=2),
)


@given(manifest=_manifests)
def test_a_manifest_comes_back_from_its_json(manifest: Manifest) -> None:
    assert decode(Manifest, json.loads(manifest.to_json())) == manifest


def test_a_whole_number_is_a_number() -> None:
    assert decode(_Outer, _GOOD | {"ratio": 2}) == _Outer(_Inner(1), ("a",), {"x": 2}, 2.0, True, None, "s")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inner": 3}, "root.inner is 3, it must be an object"),
        ({"inner": {"size": True}}, "root.inner.size is True, it must be an integer"),
        ({"inner": {"size": 1, "colour": 2}}, "root.inner.colour is unknown"),
        ({"inner": {}}, "root.inner.size is missing"),
        ({"names": ["a", 1]}, "root.names[1] is 1, it must be a string"),
        ({"names": "a"}, "root.names is 'a', it must be a list"),
        ({"sizes": {"x": 1.5}}, "root.sizes.x is 1.5, it must be an integer"),
        ({"ratio": "half"}, "root.ratio is 'half', it must be a number"),
        ({"flag": 1}, "root.flag is 1, it must be true or false"),
        ({"maybe": {"size": "x"}}, "root.maybe.size is 'x', it must be an integer"),
        ({"either": 1.5}, "root.either is 1.5, it must be an integer or a string"),
    ],
)
def test_a_field_of_another_shape_is_named_with_its_path(changes: dict[str, object], said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(_Outer, _GOOD | changes, "root")
    assert str(caught.value) == said


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(_Outer)])
def test_every_field_is_needed(name: str) -> None:
    with pytest.raises(DecodeError, match=f"^{name} is missing$"):
        decode(_Outer, {key: value for key, value in _GOOD.items() if key != name})
