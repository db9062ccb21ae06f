// The page: reads its controls, asks rope.js and engines.js, and draws the answers.
"use strict";

const $ = (id) => document.getElementById(id);
const FIRST = "Qwen/Qwen3-8B";
const OPTIONS = {
  beta_fast: { label: "beta_fast: more turns in training are kept", min: 1.1, max: 128, log: true },
  beta_slow: { label: "beta_slow: fewer turns are interpolated", min: 0.05, max: 32, log: true },
  attention_factor: { label: "attention_factor", min: 0.5, max: 2, automatic: "0.1 ln(factor) + 1" },
  low_freq_factor: { label: "low_freq_factor: fewer turns are interpolated", min: 0.05, max: 32, log: true },
  high_freq_factor: { label: "high_freq_factor: more turns are kept", min: 0.1, max: 128, log: true },
  rope_theta: { label: "rope_theta: the new base", min: 1e4, max: 1e12, log: true, automatic: "from the factor" },
  clipped: { label: "clipped: how many of the slowest pairs", min: 2, max: 64, whole: true, automatic: "those that finish no turn" },
  p: { label: "p: the share of pairs that rotates", min: 0, max: 1 },
};
const PRECISIONS = { "KV cache, 16 bits": 2, "KV cache, 8 bits": 1, "KV cache, 4 bits": 0.5 };
const WEIGHTS = { "16 bits": 2, "8 bits": 1, "4 bits": 0.5 };
const GIB = 2 ** 30;
const WITHIN = 1.01; // wavelengths rounded to whole tokens exceed the trained range by less

const state = { text: "", name: FIRST, method: "yarn", factor: 4, existing: "compose", options: {}, engine: "ctxext" };
let context = null; // what readContext makes of state.text; null where it refuses

// ----------------------------------------------------------------------------------------------- small helpers

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const tokens = (number) => Math.round(number).toLocaleString("en-US");
const short = (number) => Number(number.toPrecision(3)).toLocaleString("en-US", { maximumSignificantDigits: 3 });

function size(bytes) {
  if (bytes >= 1024 * GIB) return `${short(bytes / GIB / 1024)} TiB`;
  return bytes >= GIB ? `${short(bytes / GIB)} GiB` : `${short((bytes / GIB) * 1024)} MiB`;
}

function compact(number) {
  if (number >= 1e6) return `${short(number / 1e6)}M`;
  return number >= 1e4 ? `${short(number / 1e3)}k` : short(number);
}

// ---------------------------------------------------------------------------------------------------- controls

function fillModels() {
  const groups = new Map();
  for (const { name } of KNOWN.models) {
    const vendor = name.split("/")[0];
    if (!groups.has(vendor)) groups.set(vendor, element("optgroup", { label: vendor }));
    groups.get(vendor).append(element("option", { value: name, textContent: name.split("/")[1] }));
  }
  $("model").append(...groups.values(), element("option", { value: "", textContent: "a config.json of your own" }));
}

function fillMethods() {
  for (const name of Object.keys(METHODS)) {
    const input = element("input", { type: "radio", name: "method", value: name });
    input.addEventListener("change", () => choose({ method: name, options: {} }));
    $("methods").append(element("label", {}, input, name));
  }
}

/** The sliders of the method's options; an option that is left to its formula has a box to tick. */
function fillOptions() {
  const defaults = METHODS[state.method].options;
  $("options").replaceChildren(...Object.entries(defaults).map(([name, value]) => optionField(name, value)));
  $("more").hidden = Object.keys(defaults).length === 0;
  $("chosen").textContent = state.method;
}

function optionField(name, usual) {
  const set = (value) => choose({ options: { ...state.options, [name]: value } }, false);
  const now = state.options[name] ?? usual;
  if (typeof usual === "boolean") {
    const box = element("input", { type: "checkbox", id: name, checked: now });
    box.addEventListener("change", () => set(box.checked));
    return element("div", { className: "field" }, element("label", {}, box, " truncate: round the ramp’s ends to whole pairs"));
  }
  const { label, min, max, log, whole, automatic } = OPTIONS[name];
  const position = (value) => (log ? Math.log(value / min) / Math.log(max / min) : (value - min) / (max - min)) * 1000;
  const value = (at) => {
    const exact = log ? min * (max / min) ** (at / 1000) : min + ((max - min) * at) / 1000;
    return whole ? Math.round(exact) : Number(exact.toPrecision(3));
  };
  const shown = now ?? automaticValue(name);
  const slider = element("input", { type: "range", id: name, min: 0, max: 1000, step: 1, value: position(shown) });
  const number = element("input", { type: "number", step: "any", value: Number(shown.toPrecision(5)) || "", ariaLabel: `${name}, as a number` });
  const change = (to, from) => {
    if (from !== slider) slider.value = position(to);
    if (from !== number) number.value = to;
    if (box) box.checked = false;
    set(to);
  };
  slider.addEventListener("input", () => change(value(Number(slider.value)), slider));
  number.addEventListener("input", () => change(number.valueAsNumber, number));
  const field = element("div", { className: "field" }, element("label", { htmlFor: name }, label), element("div", { className: "pair" }, slider, number));
  const box = automatic && element("input", { type: "checkbox", checked: now === null });
  if (box) {
    box.addEventListener("change", () => {
      const { [name]: dropped, ...rest } = state.options;
      choose({ options: box.checked ? rest : { ...rest, [name]: number.valueAsNumber } });
    });
    field.append(element("label", { className: "quiet" }, box, ` automatic: ${automatic}`));
  }
  return field;
}

function automaticValue(name) {
  const rope = context && ropeToScale();
  if (name === "attention_factor") return 0.1 * Math.log(state.factor) + 1;
  if (!rope) return OPTIONS[name].min;
  return name === "rope_theta" ? raisedTheta(rope, state.factor, { rope_theta: null }) : rotations(rope).filter((turns) => turns < 1).length;
}

/** The RoPE that the method starts from; null where that is unknown. */
function ropeToScale() {
  return existing() === "compose" ? context.inUse : context.unscaled;
}

function existing() {
  return context.isScaled && composes(context) ? state.existing : "replace";
}

/** Change the state, read a changed config, and draw everything anew. */
function choose(changed, refill = true) {
  Object.assign(state, changed);
  if ("text" in changed || context === null) readModel();
  if (refill) showControls();
  else showFactor();
  answer();
  keepInAddress();
}

function readModel() {
  context = null;
  try {
    context = readContext(state.text, KNOWN);
  } catch (error) {
    complain(reasonOf(error));
  }
}

/** What to show of an error; one that nobody foresaw is in the console, too. */
function reasonOf(error) {
  if (error instanceof Refused) return error.message;
  console.error(error);
  return `This page cannot read this config (${error.message}). ctxext describe ./config.json reads it, or says why not.`;
}

function showControls() {
  $("model").value = state.name;
  if (document.activeElement !== $("config")) $("config").value = state.name ? "" : state.text;
  if (!state.name) $("own").open = true;
  $("about").textContent = METHODS[state.method].about;
  for (const input of document.querySelectorAll("[name=method]")) input.checked = input.value === state.method;
  if (context !== null) {
    $("existing-field").hidden = !(context.isScaled && composes(context));
    for (const input of document.querySelectorAll("[name=existing]")) input.checked = input.value === state.existing;
  }
  showFactor();
  fillOptions();
}

function showFactor() {
  if (state.factor > 0) $("factor").value = Math.log2(state.factor);
  if (document.activeElement !== $("factor-number")) $("factor-number").value = Number(state.factor.toPrecision(6)) || "";
  const rope = context && ropeToScale();
  if (document.activeElement !== $("target")) $("target").value = (rope && reached(state.factor, rope.length)) || "";
}

function chooseFactor(factor) {
  choose({ factor }, false);
  if ($("options").querySelector("[type=checkbox]:checked:not(#truncate)")) fillOptions(); // automatic values follow it
}

function listen() {
  $("model").addEventListener("change", () => {
    const model = KNOWN.models.find(({ name }) => name === $("model").value);
    choose(model ? { name: model.name, text: toJson(model.config, "") } : { name: "", text: $("config").value });
    if (!model) $("config").focus();
  });
  $("config").addEventListener("input", () => choose({ name: "", text: $("config").value }));
  $("file").addEventListener("change", async () => choose({ name: "", text: await $("file").files[0].text() }));
  for (const input of document.querySelectorAll("[name=existing]")) {
    input.addEventListener("change", () => choose({ existing: input.value }));
  }
  $("factor").addEventListener("input", () => chooseFactor(Number((2 ** Number($("factor").value)).toPrecision(3))));
  $("factor-number").addEventListener("input", () => chooseFactor($("factor-number").valueAsNumber));
  $("target").addEventListener("input", () => {
    if (context && ropeToScale()) chooseFactor($("target").valueAsNumber / ropeToScale().length);
  });
  $("reset").addEventListener("click", () => choose({ options: {} }));
  addEventListener("resize", () => context && answer());
}

// ------------------------------------------------------------------------------------------- the address, to share

function keepInAddress() {
  if (!state.name) return history.replaceState(null, "", location.pathname);
  const { name, method, factor, engine } = state;
  const kept = new URLSearchParams({ model: name, method, factor, engine, existing: state.existing, ...state.options });
  history.replaceState(null, "", `#${kept}`);
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const factor = Number(given.get("factor"));
  if (factor >= 1 && factor <= 1e6) state.factor = factor;
  if (given.get("method") in METHODS) state.method = given.get("method");
  if (given.get("existing") === "replace") state.existing = "replace";
  if (given.get("engine") in ENGINE_NAMES) state.engine = given.get("engine");
  for (const [name, usual] of Object.entries(METHODS[state.method].options)) {
    if (!given.has(name)) continue;
    state.options[name] = typeof usual === "boolean" ? given.get(name) === "true" : Number(given.get(name));
  }
  return KNOWN.models.find(({ name }) => name === given.get("model")) ?? KNOWN.models.find(({ name }) => name === FIRST);
}

// ----------------------------------------------------------------------------------------------------- answers

function complain(message) {
  $("problem").textContent = message;
  $("problem").hidden = false;
  $("answers").classList.add("stale");
}

function answer() {
  if (context === null) return;
  $("problem").hidden = true;
  $("answers").classList.remove("stale");
  showFacts();
  let plan;
  try {
    plan = planExtension(context, { ...state, existing: existing() });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return complain(error.message);
  }
  showVerdict(plan);
  showPhases(plan);
  showLambda(plan);
  showWavelengths(plan);
  showMemory(plan);
  showEngines(plan);
}

function tile(title, value, ...more) {
  return element("div", { className: "tile" }, title, element("b", {}, value), ...more);
}

function showFacts() {
  const { trained, source, checkpoint, parameters, turning, headDim } = context;
  const phases = trainedPhases(context), never = phases.filter((phase) => phase < TURN).length;
  const link = checkpoint && element("a", { href: checkpoint.source, textContent: "source", rel: "noreferrer" });
  const tiles = [
    tile("Trained length in tokens", tokens(trained), `${source} `, ...(link ? [link] : [])),
    tile("Pairs that never finish a turn", `${never} of ${phases.length}`, `within ${tokens(trained)} tokens${never ? ", the slowest ones" : ""}`),
    tile("Base θ", short(parameters.rope_theta), `${2 * turning} of ${headDim} dimensions of a head rotate`),
  ];
  if (context.isScaled) {
    const how = { "trained-in": "the weights were trained with it", "bolted-on": "the weights were not trained with it" }[checkpoint?.scaling];
    const origin = context.original === null ? "from an unknown length" : `from ${tokens(context.original)} tokens`;
    tiles.push(tile("Already scaled", `${parameters.rope_type}${parameters.factor ? ` ×${short(parameters.factor)}` : ""}`, [origin, how].filter(Boolean).join("; ")));
  } else if (checkpoint?.recipe) {
    const { rope_type, factor } = checkpoint.recipe;
    tiles.push(tile("The vendor’s recipe", `${rope_type} ×${factor}`, checkpoint.note ?? ""));
  }
  $("facts").replaceChildren(...tiles);
}

function worstPhase(invFreq, target) {
  return Math.max(...phaseRatios(context, invFreq, target).filter((ratio) => ratio !== null), 0);
}

function showVerdict(plan) {
  const worst = worstPhase(plan.invFreq, plan.target), plain = worstPhase((context.unscaled ?? context.inUse).invFreq, plan.target);
  const attention = plan.attentionFactor === 1 ? "" : ` cos and sin are multiplied by ${short(plan.attentionFactor)}, so attention logits grow by ${short(plan.attentionFactor ** 2)}.`;
  const within = worst <= WITHIN;
  let words = `No angle at ${tokens(plan.target)} tokens is new to the model.`;
  if (worst === 0) words = "Every pair finished a turn in training: no single angle is new, at any length.";
  else if (!within) words = `At ${tokens(plan.target)} tokens some pairs reach ${short(worst)} times their largest angle in training.`;
  if (!within && plain > worst * 1.01) words += ` Without scaling it would be ${short(plain)} times.`;
  else if (within && plain > 1 && worst > 0) words += ` Without scaling, some would reach ${short(plain)} times the largest in training.`;
  $("verdict").replaceChildren(element("b", {}, `${plan.name} ×${short(plan.factor)}: ${tokens(plan.rope.length)} → ${tokens(plan.target)} tokens. `), words + attention);
  $("verdict").classList.toggle("out", !within);
}

/** The colour of a pair's phase: grey has turned in training, blue is within, orange to red beyond the trained range. */
function colour(ratio) {
  if (ratio === null) return "var(--turned)";
  if (ratio <= WITHIN) return `color-mix(in oklab, var(--in) ${Math.round(25 + 75 * Math.min(ratio, 1))}%, var(--turned))`;
  if (ratio < 1.5) return "var(--out1)";
  return ratio < 3 ? "var(--out2)" : "var(--out3)";
}

function showPhases(plan) {
  const baseline = { name: "unscaled", invFreq: (context.unscaled ?? context.inUse).invFreq };
  const rows = [baseline, ...(context.isScaled ? [{ name: "as it is", invFreq: context.inUse.invFreq }] : [])];
  for (const name of Object.keys(METHODS)) {
    if (name === plan.name) rows.push(plan);
    else {
      try {
        rows.push(planExtension(context, { method: name, factor: state.factor, existing: existing() }));
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
      }
    }
  }
  const axis = element("div", { className: "axis" }, element("span", {}, "pair 0, fastest"), element("span", {}, `${plan.invFreq.length - 1}, slowest`));
  $("phases").replaceChildren(...rows.map((row) => phaseStrip(row, plan)), axis);
  const legend = [[null, "turned fully in training"], [0.8, "within the trained range"], [1.2, "up to ×1.5 beyond"], [2, "up to ×3"], [4, "more"]];
  $("phase-legend").replaceChildren(...legend.map(([ratio, words]) => {
    const swatch = element("i");
    swatch.style.background = colour(ratio);
    return element("span", {}, swatch, words);
  }));
}

function phaseStrip({ name, invFreq }, plan) {
  const ratios = phaseRatios(context, invFreq, plan.target), worst = worstPhase(invFreq, plan.target);
  const cells = ratios.map((ratio, pair) => {
    const cell = drawing("rect", { x: pair, width: 1.02, height: 1, style: `fill: ${colour(ratio)}` });
    const words = ratio === null ? "turned fully in training" : `${short(ratio)} times its largest angle in training`;
    cell.append(drawing("title", {}, `pair ${pair}: ${words}`));
    return cell;
  });
  const beyond = worst > WITHIN;
  const strip = element(
    "button", { type: "button", className: "strip" }, element("span", {}, name),
    drawing("svg", { viewBox: `0 0 ${ratios.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${beyond ? `up to ${short(worst)} times` : "within"} the trained range` }, ...cells),
    element("span", { className: `worst${beyond ? " out" : ""}` }, beyond ? `×${short(worst)}` : "within"),
  );
  strip.setAttribute("aria-pressed", String(name === plan.name));
  if (name in METHODS) strip.addEventListener("click", () => choose({ method: name, options: name === state.method ? state.options : {} }));
  else strip.disabled = true;
  return strip;
}

// ------------------------------------------------------------------------------------------------------ charts

/**
 * A chart over the pairs with a logarithmic axis. `lines`: [class, values, name]; `marks`: horizontal lines, [value, words];
 * `from`: the first pair of the shaded range.
 */
function chart(place, { lines, marks, from, low, high }) {
  const width = Math.max(place.clientWidth, 280), height = 250, left = 46, bottom = 34, top = 8, right = 8;
  const pairs = lines[0][1].length;
  const x = (pair) => left + ((width - left - right) * pair) / Math.max(pairs - 1, 1);
  const y = (value) => height - bottom - ((height - bottom - top) * Math.log(clamp(value, low, high) / low)) / Math.log(high / low);
  const parts = [];
  if (from < pairs) parts.push(drawing("rect", { class: "never", x: x(from - 0.5), y: top, width: width - right - x(from - 0.5), height: height - bottom - top }));
  for (const value of ticks(low, high)) {
    parts.push(drawing("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    parts.push(drawing("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, compact(value)));
  }
  for (const pair of [0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * (pairs - 1)))) {
    parts.push(drawing("text", { x: x(pair), y: height - bottom + 16, "text-anchor": "middle" }, String(pair)));
  }
  parts.push(drawing("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, "pair"));
  for (const [index, [value, words]] of marks.filter(([value]) => value >= low && value <= high).entries()) {
    parts.push(drawing("line", { class: "mark", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    parts.push(drawing("text", { x: left + 6, y: y(value) + (index ? 14 : -5) }, words));
  }
  for (const [style, values, name] of lines) {
    const points = values.map((value, pair) => `${x(pair).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    parts.push(drawing("polyline", { class: style, points }, drawing("title", {}, name)));
  }
  place.replaceChildren(drawing("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img" }, ...parts));
}

/** About five powers of 2 or 10 within a range. */
function ticks(low, high) {
  const base = high / low > 1e3 ? 10 : 2;
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9), last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first) / 6));
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, index) => base ** (first + index * step));
}

function firstThatNeverTurns() {
  return trainedPhases(context).filter((phase) => phase >= TURN).length;
}

function showLambda(plan) {
  const others = ["pi", "ntk", "yarn", "llama3"].filter((name) => name !== plan.name)
    .map((name) => planExtension(context, { method: name, factor: state.factor, existing: existing() }));
  const high = Math.max(2, plan.factor * 1.3, Math.min(Math.max(...plan.lambda), plan.factor * 8)), low = Math.min(1, ...plan.lambda) * 0.95;
  showKey("lambda-key", plan.name, others.map((other) => other.name).join(", "));
  chart($("lambda"), {
    lines: [...others.map((other) => ["other", other.lambda, other.name]), ["chosen", plan.lambda, plan.name]],
    marks: [[plan.factor, `factor ${short(plan.factor)}`]], from: firstThatNeverTurns(), low, high,
  });
}

function showKey(place, chosen, others) {
  $(place).replaceChildren(element("span", { className: "chosen" }, chosen), element("span", { className: "quiet" }, `; ${others}`));
}

function showWavelengths(plan) {
  const before = plan.rope.invFreq.map((each) => TURN / each), after = plan.invFreq.map((each) => TURN / each);
  const turning = after.filter((each) => each < 1e11);
  showKey("wavelength-key", plan.name, "dotted: before");
  chart($("wavelengths"), {
    lines: [["before", before, "before"], ["chosen", after, plan.name]],
    marks: [[plan.target, `${tokens(plan.target)}: the target`], [plan.rope.length, `${tokens(plan.rope.length)}: before`]],
    from: firstThatNeverTurns(), low: 5, high: Math.max(...before, ...turning, plan.target) * 1.5,
  });
}

// ------------------------------------------------------------------------------------------------------ memory

function showMemory(plan) {
  const count = parameterCount(context);
  const lengths = [...new Set([4096, 32768, 131072, context.trained, plan.target])].sort((one, other) => one - other);
  const head = element("tr", {}, element("th", {}, "one sequence of"), ...lengths.map((length) => element("th", { className: length === plan.target ? "target" : "" }, tokens(length))));
  const rows = Object.entries(PRECISIONS).map(([name, bytes]) => element(
    "tr", {}, element("th", {}, name),
    ...lengths.map((length) => element("td", { className: length === plan.target ? "target" : "" }, size(kvCacheBytes(context, length, bytes)))),
  ));
  $("memory").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  const sizes = Object.entries(WEIGHTS).map(([name, bytes]) => `${size(count * bytes)} in ${name}`).join(", ");
  $("memory-note").textContent = count === null
    ? `This page cannot count the weights of model_type “${context.fields.model_type}”. The cache of keys and values:`
    : `${short(count / 1e9)} billion weights${context.isNested ? " in the text model, without any for images or sound" : ""}: ${sizes}. With the cache below in 16 bits, ${tokens(plan.target)} tokens take ` +
      `${size(2 * count + kvCacheBytes(context, plan.target, 2))}, beside activations and what an engine reserves.`;
}

// ----------------------------------------------------------------------------------------------------- engines

function modelName() {
  return state.name || "./my-model";
}

/** The command of ctxext that makes this plan. */
function ownCommand(verb, plan) {
  const changed = Object.entries(plan.options).filter(([name, value]) => value !== METHODS[plan.name].options[name]);
  const options = changed.flatMap(([name, value]) => ["--option", `${name}=${value}`]);
  const how = context.isScaled ? ["--existing", plan.existing] : [];
  return ["ctxext", verb, modelName(), "--method", plan.name, "--factor", String(plan.factor), ...options, ...how];
}

function showEngines(plan) {
  const why = whyNotServed(context);
  const answers = { ctxext: { command: [...ownCommand("extend", plan), "-o", "extended"] } };
  for (const engine of Object.keys(ENGINE_NAMES)) {
    if (!why) answers[engine] = exportFor(engine, context, plan, KNOWN, modelName(), `exported/${engine}`);
  }
  if (why) answers.export = { command: ownCommand("export", plan), why };
  if (!(state.engine in answers)) state.engine = "ctxext";
  const names = { ctxext: "ctxext", export: "every engine", ...ENGINE_NAMES };
  $("engines").replaceChildren(...Object.keys(answers).map((engine) => {
    const tab = element("button", { type: "button", role: "tab", textContent: names[engine], className: answers[engine].refused ? "cannot" : "" });
    tab.setAttribute("aria-selected", String(engine === state.engine));
    tab.addEventListener("click", () => choose({ engine }, false));
    return tab;
  }));
  $("engine").replaceChildren(...engineAnswer(state.engine, answers[state.engine], plan));
}

function engineAnswer(engine, found, plan) {
  if (found.refused) return [notes([`${ENGINE_NAMES[engine]} cannot serve this: ${found.refused}`], () => true)];
  if (engine === "ctxext") {
    const written = ["ctxext", "export", "extended", "-o", "exported"];
    const verify = ["ctxext", "verify", "http://localhost:8000", "--probe", "exported/verify.json"];
    return [
      element("p", {}, "Writes a checkpoint with linked weights, and verifies the change on the model:"), copyable(commandLines(found.command)),
      element("p", {}, "A folder and a command line for each engine, and a probe:"), copyable(commandLines(written)),
      element("p", {}, "Whether a running server really applies it:"), copyable(commandLines(verify)),
    ];
  }
  if (engine === "export") return [element("p", {}, `This page leaves the engines to ctxext, because ${found.why}:`), copyable(commandLines(found.command))];
  const parts = [element("p", { className: "quiet" }, `${ENGINE_NAMES[engine]}, ${KNOWN.least[engine]} or newer; ${tokens(found.length)} tokens.`)];
  const { command } = found;
  if (found.config && !found.overrides) {
    const where = command.includes(`exported/${engine}`) ? ` in exported/${engine}, a copy of the checkpoint` : "";
    const changed = changes(context.section, found.config);
    parts.push(element("p", {}, `Change these keys of config.json${where}${command.length ? ", then run the command below" : ""}:`));
    parts.push(copyable(toJson(abbreviated(changed), ""), toJson(changed, "")));
  }
  if (command.length) parts.push(copyable(commandLines(command)));
  parts.push(notes(found.notes, (note) => /ignored|dropped|overwritten|not read|not supported/.test(note)));
  if (found.config) parts.push(download(engine, found.config));
  return parts;
}

/** Long lists by their ends, as `ctxext export` prints them. */
function abbreviated(value) {
  if (Array.isArray(value) && value.length > 4) return [value[0], `${value.length - 2} more`, value.at(-1)];
  if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, abbreviated(each)]));
}

function notes(sentences, isIgnored) {
  return element("ul", { className: "notes" }, ...sentences.map((note) => element("li", { className: isIgnored(note) ? "ignored" : "" }, note)));
}

/** A block of text with a button that copies it, or what it abbreviates. */
function copyable(text, whole = text) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(whole);
    button.textContent = "Copied";
  });
  return element("div", { className: "copyable" }, element("pre", {}, text), button);
}

/** A link to the whole config.json; the models to choose from have only the fields that this page reads. */
function download(engine, config) {
  if (state.name) return element("p", { className: "quiet" }, "To download the whole config.json for this engine, paste the model’s own above.");
  const href = URL.createObjectURL(new Blob([`${toJson(config, "")}\n`], { type: "application/json" }));
  return element("a", { className: "button", href, download: "config.json" }, "Download config.json");
}

function start() {
  $("more").open = matchMedia("(min-width: 64rem)").matches;
  fillModels();
  fillMethods();
  listen();
  const model = readAddress();
  choose({ name: model.name, text: toJson(model.config, "") });
}

start();
