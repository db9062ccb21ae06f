# Two commands on a fresh machine with Python 3.11+, make and git: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-all lint prose at-scale smollm2 in-attention verify fit benchmark soak finetune positions families figures seeds fidelity engines engines-versions notebooks docs clean

$(VENV)/demo.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Beside the environment, and on the path of its own tests alone: transformers imports DeepSpeed wherever it finds it.
$(VENV)/deepspeed: $(VENV)/dev.stamp
	-DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --upgrade --constraint constraints.txt --target $@ deepspeed einops hjson msgpack ninja py-cpuinfo

demo: $(VENV)/demo.stamp  ## a trained model breaks past its length, is extended, works, reloads
	$(BIN)/ctxext demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test: $(VENV)/dev.stamp  ## all fast tests, and every block of the README
	$(PYTEST) -m "not slow"

test-all: test $(VENV)/deepspeed  ## and the whole of its products: kills, processes, notebooks, every method on every family
	$(PYTEST) -m slow

lint: $(VENV)/dev.stamp prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

tools/prose/node_modules: tools/prose/package-lock.json
	npm ci --prefix tools/prose --ignore-scripts --no-audit --no-fund --silent
	@touch $@

prose: tools/prose/node_modules  ## the words and sentences of every page, with textlint; needs Node.js 20
	$(PYTHON) tools/prose/cells.py
	npm run --prefix tools/prose --silent lint

smollm2: $(VENV)/dev.stamp  ## the same comparison on a public model, at 16384 tokens
	$(BIN)/python recipes/smollm2.py

at-scale: $(VENV)/dev.stamp  ## public models at real lengths; what was stopped resumes
	$(BIN)/python benchmarks/at_scale/run.py

# A benchmark exits with 1 where a figure is short, which the tables are to say: hence the dashes.
fit: $(VENV)/dev.stamp  ## rescale factors fitted to the bundled model, beside every static method
	-$(BIN)/python benchmarks/fit.py --ablation 0 --factors 4
	-$(BIN)/python benchmarks/fit_by_layer.py
	-$(BIN)/python benchmarks/fit.py
	-$(BIN)/python benchmarks/fit_longrope2.py
	-$(BIN)/python benchmarks/fit_smollm2.py
	-$(BIN)/python benchmarks/recommend.py
	$(BIN)/python docs/update_readme.py

verify: $(VENV)/dev.stamp  ## live, ignored and without the temperature told apart; `make smollm2` fetches the model
	$(BIN)/python benchmarks/verify.py

benchmark: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/patch.py
	$(BIN)/python benchmarks/evaluators.py
	$(BIN)/python benchmarks/choice.py
	$(BIN)/python benchmarks/passkey_scores.py
	$(BIN)/python benchmarks/finetune.py
	$(BIN)/python benchmarks/attention.py
	-$(BIN)/python benchmarks/attention.py --dtype bfloat16
	$(BIN)/python benchmarks/llama_cpp.py
	$(BIN)/python benchmarks/versions.py
	$(BIN)/python benchmarks/export.py

in-attention: $(VENV)/dev.stamp  ## in-attention RoPE on a public model; `make smollm2` fetches it
	$(BIN)/python benchmarks/dynamic.py --model runs/SmolLM2-135M-Instruct --trained-length 256 --windows 2 --texts 1
	$(BIN)/ctxext compare runs/SmolLM2-135M-Instruct --target-length 16k --lengths 8k,16k --dtype bfloat16 \
		--tasks perplexity,short --windows 4 --output runs/smollm2-16k.jsonl
	$(BIN)/ctxext report runs/smollm2-16k.jsonl --output runs/report-16k.html --figures runs/figures
	cp runs/figures/smollm2-16k.json docs/compare/
	$(BIN)/python docs/update_readme.py

soak: $(VENV)/dev.stamp  ## measurements and fine-tunes killed at random moments
	$(BIN)/python benchmarks/soak.py --kills 100
	$(BIN)/python benchmarks/finetune_soak.py --kills 20

finetune: $(VENV)/dev.stamp  ## the bundled model fine-tuned at four times its length, by four ways
	$(BIN)/python benchmarks/finetune_methods.py
	$(BIN)/python docs/update_readme.py

positions: $(VENV)/dev.stamp  ## five position encodings trained alike at one length, read at four times it
	$(BIN)/python benchmarks/train_short_test_long.py
	$(BIN)/python docs/update_readme.py

fidelity: $(VENV)/dev.stamp  ## beside the authors' code, longppl, lm-eval and a plain loop; training: posgen.py, cope.py
	$(BIN)/python benchmarks/fidelity/run.py

engines: $(VENV)/dev.stamp  ## every static method in each engine, in an environment of its own, against transformers
	$(BIN)/python benchmarks/engines/run.py --rounds 20
	$(BIN)/python benchmarks/evaluators_vllm.py

engines-versions: $(VENV)/dev.stamp  ## the config and rotary code of every release of vLLM and SGLang, run alone
	$(BIN)/python benchmarks/engines/versions.py
	$(BIN)/python benchmarks/engines/versions.py --engine sglang
	$(BIN)/python docs/update_readme.py

notebooks: $(VENV)/dev.stamp  ## run, with what they print and draw kept in them
	$(BIN)/python tools/run_notebooks.py

docs: $(VENV)/dev.stamp  ## the docs site, built strictly, at http://localhost:8000
	$(BIN)/mkdocs serve --strict

families: $(VENV)/dev.stamp  ## every model type of transformers built small, extended and compared
	PYTHONPATH=tools $(BIN)/python -m survey --json docs/families.json --markdown docs/families.md

figures: $(VENV)/dev.stamp  ## the README's figure and numbers, anew
	$(BIN)/ctxext demo --output docs/demo
	-$(BIN)/python benchmarks/bundled_model.py
	$(BIN)/ctxext compare ctxext/assets/austen-4m --factor 4 --windows 16 --output runs/austen-4m.jsonl
	$(BIN)/ctxext report runs/austen-4m.jsonl --output runs/report.html --figures runs/figures
	cp runs/figures/austen-4m.json docs/compare/
	$(BIN)/ctxext compare ctxext/assets/austen-4m --factor 8 --windows 8 --trials 4 --output runs/austen-4m-8x.jsonl
	$(BIN)/ctxext report runs/austen-4m-8x.jsonl --output runs/report-8x.html --figures runs/figures
	cp runs/figures/austen-4m-8x.json docs/compare/
	$(BIN)/python benchmarks/dynamic.py
	$(BIN)/python docs/update_readme.py

seeds: $(VENV)/dev.stamp  ## newer methods beside older ones, on other prompts and windows
	for seed in 1 2; do $(BIN)/ctxext compare ctxext/assets/austen-4m --factor 4 --windows 16 --seed $$seed --methods \
		ntk_by_parts,yarn,self_extend,cope,p_rope,query_temperature -o runs/austen-4m-seed$$seed.jsonl || exit 1; done
	for seed in 0 1 2; do $(BIN)/ctxext compare ctxext/assets/austen-4m --target-length 960 --lengths 512,960 --windows 16 \
		--seed $$seed --methods yarn,self_extend,dca,string -o runs/austen-4m-960-seed$$seed.jsonl || exit 1; done
	for file in seed1 seed2 960-seed0 960-seed1 960-seed2; do $(BIN)/ctxext report runs/austen-4m-$$file.jsonl \
		--output runs/report.html --figures runs/figures && cp runs/figures/austen-4m-$$file.json docs/compare/; done
	$(BIN)/python docs/update_readme.py

clean:
	rm -rf $(VENV) ctxext-demo build dist
