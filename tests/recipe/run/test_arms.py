"""Arms as they are written, and what is refused."""

from typing import Any

import pytest

from recipe.run.arms import read_arms
from recipe.run.config import ConfigError
from recipe.run.launch import prepare
from recipe.run.plan import Plan

FILES = ["alibi", "sinks"]
TINY = ["experiment=arena", "data.cache=cache", "device=cpu"]


def test_arms_are_overrides_or_files():
    arms = read_arms("causal: score=causal optimizer.lr=1e-3 | alibi | plain: ", FILES)
    assert arms == {"causal": ["score=causal", "optimizer.lr=1e-3"], "alibi": ["arm=alibi"], "plain": []}


def test_quotes_protect_blanks_and_bars():
    arms = read_arms("""a: 'score.layers=[{window: 4}, {}]' | b: "data.path=x | y" seed_free=1""", FILES)
    assert arms == {"a": ["score.layers=[{window: 4}, {}]"], "b": ["data.path=x | y", "seed_free=1"]}


def test_a_formula_needs_no_quotes_of_its_own():
    arms = read_arms("a: score.formula=s if i == j else s * log(n) seed_free=1 | b: x=1 ++score.learned.a=[h]", FILES)
    assert arms["a"] == ["score.formula=s if i == j else s * log(n)", "seed_free=1"]
    assert arms["b"] == ["x=1", "++score.learned.a=[h]"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: x=1 | | b: x=2", "an arm without a name"),
        ("score=causal | b: x=2", "an arm without a name"),
        ("a: x=1 | a: x=2", "names a twice"),
        ("alibbi", r"arena\.arms=alibbi has no overrides and is not a file of conf/arm/ \(alibi, sinks\)"),
        ("a: 'x=1", "cannot be read: No closing quotation"),
    ],
)
def test_arms_that_cannot_be_read_are_named(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_arms(text, FILES)


def prepared(*overrides: str) -> Plan:
    sweep: Any = prepare([*TINY, *overrides])
    return sweep.__wrapped__.args[0]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        prepare([*TINY, *overrides])
    return str(error.value)


def test_the_arms_of_the_experiment_and_of_the_command_line_are_accepted():
    assert list(prepared().arms) == ["causal", "window", "alibi", "sinks"]
    arms = "arena.arms=causal: score=causal | alibi: score=alibi optimizer.lr=1e-3"
    assert prepared(arms).arms == {"causal": ["score=causal"], "alibi": ["score=alibi", "optimizer.lr=1e-3"]}


def test_a_window_as_long_as_the_row_is_another_configuration():
    prepare([*TINY, "arena.arms=causal: score=causal | window: score=window score.window=128"])


@pytest.mark.parametrize(
    ("arm", "sentence"),
    [
        ("score=causal seq_len=128", "arms a and b are the same configuration"),
        ("score=alibi data.tokenizer=gpt2", "arm b has data.tokenizer=gpt2 and arm a"),
        ("seq_len=64", "arm b has seq_len=64 and arm a has seq_len=128"),
        ("score=alibbi", "arm b: score=alibbi is not known"),
        ("model.n_heads=3", "arm b: model.n_embd=128 is not a multiple"),
        ("seed=3", "arm b: seed=3 is set by the plan of the sweep; leave it out"),
        ("resume=auto", "arm b: resume=auto is set by the plan of the sweep"),
    ],
)
def test_an_arena_that_cannot_decide_is_refused_before_it_runs(arm, sentence):
    assert sentence in refused(f"arena.arms=a: score=causal | b: {arm}")


def test_a_mistake_of_all_arms_is_reported_once():
    assert refused("model.n_heads=3").count("model.n_embd=128 is not a multiple") == 1
    assert "arm" not in refused("model.n_heads=3")
