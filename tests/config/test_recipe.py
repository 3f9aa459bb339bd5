"""Any config is unchanged by a round trip; any content of a recipe is a config or an error."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ddp.config import recipe, sections
from raytrain_ddp.config.recipe import changed_fields, dumps, from_dict, load, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError

numbers = st.floats(1e-6, 1e6)
texts = partial(  # others are refused: test_hostile_text.py
    st.text,
    st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\u2028\u2029\ufeff~"),
)
configs = st.builds(
    TrainConfig,
    name=st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True),
    storage=texts(min_size=1),
    task_options=st.dictionaries(texts(), texts(), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    epochs=st.integers(1, 10**6),
    data=st.builds(
        sections.DataConfig,
        source=texts(min_size=1),
        eval_source=st.none() | texts(),
        mean=st.tuples(*[st.floats(0, 1)] * 3),
        shuffle=st.sampled_from(["auto", "full", "block"]),
        workers=st.just("auto") | st.integers(0, 99),
    ),
    model=st.builds(
        sections.ModelConfig,
        weights=st.none() | texts(),
        dropout=st.just(0.5),
        args=st.dictionaries(
            st.sampled_from(["drop_path_rate", "img_size"]),
            texts() | st.booleans() | st.integers() | numbers,
        ),
        freeze=st.lists(texts(), max_size=2).map(tuple),
    ),
    optim=st.builds(
        sections.OptimConfig,
        name=st.sampled_from(["sgd", "adamw"]),
        lr=numbers,
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    ),
)


@settings(max_examples=40)
@given(configs)
def test_a_config_is_unchanged_after_a_round_trip_through_dict_and_toml(config: TrainConfig):
    assert from_dict(to_dict(config)) == config
    again = from_dict(recipe.tomllib.loads(dumps(config)))
    assert again == config
    assert dumps(again) == dumps(config)
    changed = recipe.tomllib.loads(dumps(config, TrainConfig()))
    assert from_dict(changed) == config
    default = recipe.flat(TrainConfig())
    assert all(default[name] != value for name, value in recipe.fields_of(changed))
    assert changed_fields(to_dict(config), again) == []


def test_any_recipe_bytes_give_a_config_or_a_config_error(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    whole = b'epochs = 3\n[optim]\nname = "adamw"\nbetas = [0.5, 0.9]\n'
    cut = [whole[:size] for size in range(len(whole))]
    odd = [b"\xff\xfe", b"\0", b"a.b.c = 1", b"= 1", b"[[optim]]", b"[optim]\n[optim]"]
    for content in (*cut, *odd, b"\xef\xbb\xbfx=1"):
        path.write_bytes(content)
        with contextlib.suppress(ConfigError):
            assert isinstance(load(str(path)), TrainConfig)
