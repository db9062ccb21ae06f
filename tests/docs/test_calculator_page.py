"""docs/calculator in a real browser: every control, wrong input, a narrow screen, dark mode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "calculator" / "index.html"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page from its file; whatever it complains about or asks for beyond its own folder fails the test."""
    said: list[str] = []
    contexts: list[Any] = []

    def opened(state: str = "", scheme: str = "light", width: int = 1280) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        own = (PAGE.parent.as_uri(), "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(own) or said.append(request.url))
        page.goto(PAGE.as_uri() + state)
        contexts.append(context)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


def paste(page: Any, text: str) -> None:
    if not page.locator("#own").evaluate("own => own.open"):
        page.click("#own summary")
    page.fill("#config", text)


def verdict(page: Any) -> str:
    return page.inner_text("#verdict")


def test_a_known_model_says_how_its_trained_length_is_known(open_page: Callable[..., Any]) -> None:
    page = open_page()
    facts = page.inner_text("#facts")
    assert "32,768" in facts
    assert "known as Qwen3 dense, 0.6B to 32B" in facts
    assert page.get_attribute("#facts a", "href") == "https://huggingface.co/Qwen/Qwen3-8B"
    assert verdict(page).startswith("yarn ×4: 32,768 → 131,072 tokens. No angle at 131,072 tokens is new to the model.")


def test_every_control_changes_the_answer(open_page: Callable[..., Any]) -> None:
    page = open_page()
    seen = {verdict(page)}

    def changes() -> bool:
        is_new = (now := verdict(page)) not in seen
        seen.add(now)
        return is_new

    page.fill("#factor-number", "8")
    assert changes()
    assert page.input_value("#target") == "262144"
    page.fill("#target", "65536")
    assert changes()
    assert page.input_value("#factor-number") == "2"
    page.focus("#factor")
    page.keyboard.press("ArrowRight")
    assert changes()
    page.fill("[aria-label='attention_factor, as a number']", "1.25")
    assert changes()
    assert "multiplied by 1.25" in verdict(page)
    page.click("#reset")
    assert "multiplied by 1.25" not in verdict(page)
    for name in ("ntk", "pi", "abf", "llama3", "resonance", "cope", "p_rope", "drope", "ntk_by_parts"):
        page.check(f"[name=method][value={name}]", force=True)
        assert changes(), name
        assert page.locator(".strip[aria-pressed=true]").inner_text().startswith(name)
    page.locator(".strip", has_text="yarn").first.click()
    assert verdict(page).startswith("yarn")
    curve = page.locator("#lambda .chosen").get_attribute("points")
    page.focus("#beta_fast")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#lambda .chosen").get_attribute("points") == curve  # the same whole pair
    page.uncheck("#truncate")
    assert page.locator("#lambda .chosen").get_attribute("points") != curve
    page.select_option("#model", "meta-llama/Llama-3.1-8B-Instruct")
    assert changes()
    composed = verdict(page)
    page.check("[name=existing][value=replace]", force=True)
    assert verdict(page) != composed


def test_each_engine_has_its_command_and_what_it_ignores_in_red(open_page: Callable[..., Any]) -> None:
    page = open_page("#model=Qwen/Qwen3-8B&method=ntk_by_parts&factor=4")
    page.click("[role=tab]:text-is('vLLM')")
    command = page.inner_text("#engine pre")
    assert command.startswith("vllm serve Qwen/Qwen3-8B \\\n  --max-model-len 131072 \\\n  --hf-overrides '{")
    assert json.loads(command[command.index("'{") + 1 : -1])["rope_parameters"]["attention_factor"] == 1.0
    ignored = page.locator(".notes .ignored")
    assert "attention_factor of yarn is ignored" in ignored.inner_text()
    red, _, blue = page.evaluate(
        "node => getComputedStyle(node).color.match(/\\d+/g).map(Number)", ignored.element_handle()
    )
    assert red > 2 * blue
    page.click("[role=tab]:text-is('llama.cpp')")
    assert "--rope-scaling yarn" in page.inner_text("#engine")
    page.check("[name=method][value=llama3]", force=True)
    assert "llama.cpp cannot serve this" in page.inner_text("#engine")


def test_the_downloaded_config_is_the_pasted_one_extended(open_page: Callable[..., Any]) -> None:
    page = open_page()
    paste(page, json.dumps(LLAMA))
    page.click("[role=tab]:text-is('transformers 5')")
    with page.expect_download() as download:
        page.click("text=Download config.json")
    config = json.loads(Path(download.value.path()).read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"]["rope_type"] == config["rope_scaling"]["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "This is not JSON"),
        ("[1]", "A config.json is one object"),
        ('{"model_type": "bloom", "hidden_size": 64}', "it has ALiBi"),
        ('{"model_type": "gpt2", "n_positions": 1024}', "no rotary position embedding"),
        (json.dumps({**LLAMA, "hidden_size": 1e30}), "hidden_size must be a whole number"),
        (json.dumps({**LLAMA, "num_hidden_layers": 10**12}), "num_hidden_layers must be a whole number"),
        (json.dumps({**LLAMA, "rope_theta": -1}), "rope_theta must be a number"),
        (json.dumps({**LLAMA, "rope_scaling": "yarn"}), "rope_scaling must be an object"),
        ('{"model_type": "gptj", "n_positions": 2048}', "does not know model_type"),
        ('{"model_type": "__proto__"}', "does not know model_type"),
        (json.dumps({**LLAMA, "layer_types": [1, 2]}), "layer_types must be a list of 22 names"),
        (json.dumps({**LLAMA, "layer_types": "full"}), "layer_types must be a list of 22 names"),
        (json.dumps({**LLAMA, "num_key_value_heads": -4}), "num_key_value_heads must be a whole number"),
        (json.dumps({**LLAMA, "num_key_value_heads": 0}), "num_key_value_heads must be a whole number"),
        (json.dumps({**LLAMA, "intermediate_size": -5}), "intermediate_size must be a whole number"),
        (json.dumps({**LLAMA, "sliding_window": -1}), "sliding_window must be a whole number"),
        (json.dumps({**LLAMA, "vocab_size": 1e300}), "vocab_size must be a whole number"),
        (json.dumps({**LLAMA, "head_dim": 97}), "97 rotary dimensions"),
        (json.dumps({**LLAMA, "rope_scaling": {"type": "yarn"}}), "factor must be a number"),
        (json.dumps({**LLAMA, "kv_lora_rank": 512}), "qk_rope_head_dim must be a whole number"),
        (json.dumps({**LLAMA, "ctxext": {"original": {}, "start": 1}}), "metadata of ctxext in this config is damaged"),
        ('{"model_type": "qwen2_moe", "use_sliding_window": true}', "Write layer_types"),
        (json.dumps({**LLAMA, "rope_scaling": {"type": "new"}}), 'rope_type "new" is not one of'),
        (json.dumps({**LLAMA, "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}),
         "must be a list of 32 positive numbers"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_words(open_page: Callable[..., Any], text: str, words: str) -> None:
    page = open_page()
    paste(page, text)
    assert words in page.inner_text("#problem")
    paste(page, json.dumps(LLAMA))  # and what comes next is computed
    assert not page.is_visible("#problem")
    assert "2,048 → 8,192" in verdict(page)


def test_absurd_numbers_are_refused(open_page: Callable[..., Any]) -> None:
    page = open_page()
    for wrong in ("0.5", "1e9", ""):
        page.fill("#factor-number", wrong)
        assert "factor must be a number from 1" in page.inner_text("#problem")
    page.fill("#factor-number", "4")
    page.fill("[aria-label='beta_slow, as a number']", "64")
    assert "beta_fast must exceed beta_slow" in page.inner_text("#problem")


def test_an_already_scaled_config_is_composed_with_or_replaced(open_page: Callable[..., Any]) -> None:
    page = open_page()
    scaled = {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}
    paste(page, json.dumps({**scaled, "max_position_embeddings": 8192}))
    assert "yarn ×4" in page.inner_text("#facts")
    assert "8,192 → 32,768" in verdict(page)
    page.check("[name=existing][value=replace]", force=True)
    assert "2,048 → 8,192" in verdict(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_legible(open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page("#engine=vllm&method=cope", scheme, width=360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(x => x < 60)")
    assert dark == (scheme == "dark")


def test_the_address_restores_what_was_shared(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.select_option("#model", "meta-llama/Llama-2-7b-hf")
    page.fill("#factor-number", "16")
    page.fill("[aria-label='beta_fast, as a number']", "24")
    page.click("[role=tab]:text-is('SGLang')")
    again = open_page(page.url[page.url.index("#") :])
    for place in ("#verdict", "#engine", "#facts"):
        assert again.inner_text(place) == page.inner_text(place)
    assert "beta_fast" in again.inner_text("#engine")
