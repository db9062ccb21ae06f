// What a config.json says about RoPE, and what each method makes of it: numbers in, numbers out, no page.
// The same formulas as ctxext/methods and ctxext/models; the tests compare both, and these with conformance/*.json.
"use strict";

const NO_ROTATION = 1e12; // λ of a pair that keeps no position: JSON has no infinity
const MAX_TOKENS = 2 ** 31 - 1;
const TURN = 2 * Math.PI;

/** A config or an option that cannot be computed with; the message says what, got and remedy. */
class Refused extends Error {}

// ------------------------------------------------------------------------------------------ the methods

// `rescale` gives λ for each pair of `rope`; `attention` the multiplier of cos and sin, 1 where it is left out;
// `parameters` transformers' rope_parameters on plain RoPE, `longrope` where it is left out.
const METHODS = {
  yarn: {
    about: "NTK-by-parts, with cos and sin × (0.1 ln factor + 1)",
    options: { beta_fast: 32, beta_slow: 1, truncate: true, attention_factor: null },
    rescale: rescaleByParts,
    attention: (rope, factor, options) => options.attention_factor ?? 0.1 * Math.log(factor) + 1,
    parameters: yarnParameters,
  },
  ntk_by_parts: {
    about: "keep fast pairs, divide slow ones by the factor, a ramp between",
    options: { beta_fast: 32, beta_slow: 1, truncate: true },
    rescale: rescaleByParts,
    parameters: yarnParameters,
  },
  llama3: {
    about: "by parts over wavelengths, as in Llama 3.1",
    options: { low_freq_factor: 1, high_freq_factor: 4 },
    rescale(rope, factor, { low_freq_factor: low, high_freq_factor: high }) {
      return rotations(rope).map((turns) => {
        const keep = high > low ? clamp((turns - low) / (high - low), 0, 1) : Number(turns >= low);
        return 1 / (1 - (1 - keep) * (1 - 1 / factor));
      });
    },
    parameters: (rope, factor, { low_freq_factor, high_freq_factor }) => ({
      rope_type: "llama3", rope_theta: rope.theta, factor, low_freq_factor, high_freq_factor,
      original_max_position_embeddings: rope.length,
    }),
  },
  ntk: {
    about: "a raised base: the fastest pair stays, the slowest is divided by the factor",
    options: {},
    rescale: (rope, factor) => rope.invFreq.map((_, pair) => factor ** ((2 * pair) / (rope.dim - 2))),
    parameters: (rope, factor) => ({
      rope_type: "default", rope_theta: rope.theta * factor ** (rope.dim / (rope.dim - 2)),
    }),
  },
  pi: {
    about: "every position divided by the factor",
    options: {},
    rescale: (rope, factor) => rope.invFreq.map(() => factor),
    parameters: (rope, factor) => ({ rope_type: "linear", rope_theta: rope.theta, factor }),
  },
  abf: {
    about: "a raised base, chosen so that as many pairs finish a turn",
    options: { rope_theta: null },
    rescale(rope, factor, options) {
      const ratio = raisedTheta(rope, factor, options) / rope.theta;
      return unscaledIndex(rope).map((index) => ratio ** ((2 * index) / rope.dim));
    },
    parameters: (rope, factor, options) => ({ rope_type: "default", rope_theta: raisedTheta(rope, factor, options) }),
  },
  resonance: {
    about: "YaRN with wavelengths rounded to whole tokens",
    options: {},
    rescale(rope, factor) {
      const rounded = METHODS.yarn.rescale(rope, factor, METHODS.yarn.options);
      return rope.invFreq.map((each, pair) => (Math.round((TURN / each) * rounded[pair]) * each) / TURN);
    },
    attention: (rope, factor) => METHODS.yarn.attention(rope, factor, METHODS.yarn.options),
  },
  cope: {
    about: "clips the pairs that finish no turn; to be fine-tuned",
    options: { clipped: null },
    rescale(rope, factor, options) {
      const pairs = rope.invFreq.length;
      const n = options.clipped ?? rotations(rope).filter((turns) => turns < 1).length;
      if (options.clipped !== null && !(n >= 2 && n <= pairs)) {
        throw new Refused(`clipped must be a number of pairs from 2 to ${pairs}, got ${n}.`);
      }
      return rope.invFreq.map((_, pair) => {
        if (pair < pairs - n) return 1;
        const share = n > 1 ? (pair - (pairs - n)) / (n - 1) : 1;
        return Math.min(2 / (1 + Math.cos(Math.PI * share)), NO_ROTATION);
      });
    },
  },
  p_rope: {
    about: "only the fastest share p of the pairs rotates; to be fine-tuned",
    options: { p: 0.75 },
    rescale: (rope, factor, { p }) => rope.invFreq.map((_, pair) => (pair < Math.floor(p * rope.invFreq.length) ? 1 : NO_ROTATION)),
  },
  drope: {
    about: "no pair rotates; to be fine-tuned",
    options: {},
    rescale: (rope) => rope.invFreq.map(() => NO_ROTATION),
  },
};

function rescaleByParts(rope, factor, { beta_fast, beta_slow, truncate }) {
  if (!(beta_slow > 0 && beta_slow < beta_fast)) {
    throw new Refused(`beta_fast must exceed beta_slow > 0, got ${beta_fast} and ${beta_slow}. The paper uses 32 and 1.`);
  }
  const index = unscaledIndex(rope);
  const first = index[0], last = index[index.length - 1];
  let low = correctionDim(beta_fast, rope), high = correctionDim(beta_slow, rope);
  if (truncate) {
    low = low > first ? Math.max(...index.filter((each) => each <= low)) : first;
    high = high <= last ? Math.min(...index.filter((each) => each >= high)) : last + Math.ceil(high - last);
  }
  low = Math.max(low, first);
  high = Math.max(Math.min(high, last + rope.dim / 2), low);
  if (low === high) high += 0.001; // as in the YaRN code: a step
  return index.map((each) => 1 / (1 - clamp((each - low) / (high - low), 0, 1) * (1 - 1 / factor)));
}

function yarnParameters(rope, factor, { beta_fast, beta_slow, truncate, attention_factor }) {
  const found = {
    rope_type: "yarn", rope_theta: rope.theta, factor, original_max_position_embeddings: rope.length, beta_fast, beta_slow,
  };
  // yarn without one takes 0.1 ln(factor) + 1; ntk_by_parts has no such option, and takes 1.
  if (attention_factor !== null) found.attention_factor = attention_factor ?? 1;
  if (!truncate) found.truncate = false;
  return found;
}

/** The base at which as many pairs finish a turn within factor · L as did within L (arXiv:2310.05209). */
function raisedTheta(rope, factor, { rope_theta }) {
  if (rope_theta === null) return rope.theta ** (1 + Math.log(factor) / Math.log(rope.length / TURN));
  if (!(rope_theta >= rope.theta && rope_theta <= 1e30)) {
    throw new Refused(`rope_theta must be at least the model's ${rope.theta}, got ${rope_theta}.`);
  }
  return rope_theta;
}

// ------------------------------------------------------------------------------------- frequencies of RoPE

/** theta^(-2i/d) in radians per token, for i = 0 … d/2 - 1. */
function plainFrequencies(dim, theta) {
  return Array.from({ length: Math.floor(dim / 2) }, (_, pair) => theta ** ((-2 * pair) / dim));
}

/** Plain RoPE of `dim` rotary dimensions trained at `length` tokens. */
function plainRope(dim, theta, length) {
  return { invFreq: plainFrequencies(dim, theta), dim, theta, length, attentionFactor: 1, isPlain: true };
}

/** Full turns of each pair within the trained length. */
function rotations(rope) {
  return rope.invFreq.map((each) => (rope.length * each) / TURN);
}

/** The index at which plain RoPE of the same base turns as fast as each pair does: i itself for plain RoPE. */
function unscaledIndex(rope) {
  if (rope.isPlain) return rope.invFreq.map((_, pair) => pair);
  const plain = plainFrequencies(rope.dim, rope.theta);
  return plain.map((each, pair) => pair + (rope.dim * Math.log(each / rope.invFreq[pair])) / (2 * Math.log(rope.theta)));
}

/** The index of a pair that turns `turns` times within the trained length. */
function correctionDim(turns, rope) {
  return (rope.dim * Math.log(rope.length / (turns * TURN))) / (2 * Math.log(rope.theta));
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** transformers' rope_parameters of a config's text section, with what version 5 fills in. */
function ropeParameters(section) {
  let given = section.rope_scaling ?? section.rope_parameters ?? {};
  const perLayer = Object.values(given).some((value) => value !== null && typeof value === "object" && !Array.isArray(value));
  if (perLayer) given = given.full_attention ?? Object.values(given).find((value) => typeof value === "object");
  const found = {
    rope_theta: section.rope_theta, ...without(given, ["type"]), rope_type: given.rope_type ?? given.type ?? "default",
  };
  if (found.rope_type === "su") found.rope_type = "longrope";
  if (found.rope_type === "mrope") found.rope_type = "default"; // of images; text positions are those of plain RoPE
  const share = given.partial_rotary_factor ?? section.partial_rotary_factor;
  if (share !== undefined && share !== null) found.partial_rotary_factor = share;
  if (["llama3", "yarn", "longrope"].includes(found.rope_type)) {
    const outside = section.original_max_position_embeddings;
    if (outside) found.original_max_position_embeddings = outside;
    found.original_max_position_embeddings ??= section.max_position_embeddings; // as transformers 5 does
  }
  return found;
}

/** The frequencies and the multiplier of cos and sin that rope_parameters mean for a sequence of `length` tokens. */
function ropeInUse(parameters, headDim, limit, length) {
  const share = parameters.partial_rotary_factor ?? 1, theta = parameters.rope_theta;
  const dim = Math.floor(headDim * share);
  const original = parameters.original_max_position_embeddings ?? limit;
  const factor = parameters.factor ?? limit / original;
  const rope = plainRope(dim, theta, original);
  const scaled = (lambda, attentionFactor) => ({
    ...rope, invFreq: rope.invFreq.map((each, pair) => each / lambda[pair]), attentionFactor, isPlain: false,
  });
  switch (parameters.rope_type) {
    case "default":
    case "dynamic": // unscaled within the trained length
      return rope;
    case "linear":
      return scaled(rope.invFreq.map(() => factor), 1);
    case "proportional": {
      const turning = Math.floor((headDim * share) / 2);
      const invFreq = plainFrequencies(headDim, theta).map((each, pair) => (pair < turning ? each / factor : 0));
      return { ...rope, dim: headDim, invFreq, isPlain: false };
    }
    case "yarn": {
      const options = {
        beta_fast: parameters.beta_fast || 32, beta_slow: parameters.beta_slow || 1, truncate: parameters.truncate ?? true,
      };
      return scaled(rescaleByParts(rope, factor, options), yarnAttentionFactor(parameters, factor));
    }
    case "llama3":
      return scaled(METHODS.llama3.rescale(rope, factor, parameters), 1);
    case "longrope": {
      const lists = parameters[length > original ? "long_factor" : "short_factor"];
      const attentionFactor = parameters.attention_factor ?? (factor > 1 ? Math.sqrt(1 + Math.log(factor) / Math.log(original)) : 1);
      return scaled(lists, attentionFactor);
    }
  }
  throw new Refused(
    `rope_type "${parameters.rope_type}" is not one of default, linear, dynamic, yarn, longrope, llama3 and proportional.`,
  );
}

/** 0.1 mscale ln(factor) + 1; 1 for factors up to 1. */
function yarnGrowth(factor, mscale = 1) {
  return factor <= 1 ? 1 : 0.1 * mscale * Math.log(factor) + 1;
}

/** attention_factor; or mscale over mscale_all_dim (DeepSeek) if there are both; or the paper's. */
function yarnAttentionFactor({ attention_factor, mscale, mscale_all_dim }, factor) {
  if (attention_factor != null) return attention_factor;
  return mscale && mscale_all_dim ? yarnGrowth(factor, mscale) / yarnGrowth(factor, mscale_all_dim) : yarnGrowth(factor);
}

// ---------------------------------------------------------------------------------------- reading a config

const OTHER_ENCODINGS = {
  bloom: "ALiBi", mpt: "ALiBi", gpt2: "a learned table of positions", opt: "a learned table of positions",
  bert: "a learned table of positions", roberta: "a learned table of positions", t5: "T5's relative buckets",
};

/** The text model's part of a config.json, and the whole. */
function parseConfig(text) {
  let config;
  try {
    config = JSON.parse(text.replace(/^\uFEFF/, ""));
  } catch (error) {
    throw new Refused(`This is not JSON (${error.message}). Paste the whole file, from the first { to the last }.`);
  }
  if (config === null || typeof config !== "object" || Array.isArray(config)) {
    throw new Refused("A config.json is one object, { … }. Paste the whole file.");
  }
  const nested = config.text_config;
  return { config, section: nested !== null && typeof nested === "object" ? nested : config };
}

/** The fields that are computed with, under transformers' names; what is left out has the model type's default. */
function withDefaults(section, type) {
  const own = Object.fromEntries(Object.entries(type?.names ?? {}).filter(([, name]) => name in section).map(([standard, name]) => [standard, section[name]]));
  return { ...(type?.defaults ?? {}), ...section, ...own };
}

/**
 * The context of a config: its lengths, its RoPE in use and before any scaling.
 * `known` is the data of known.js: { types, checkpoints }.
 */
function readContext(text, known) {
  const { config, section } = parseConfig(text);
  const type = Object.hasOwn(known.types, section.model_type) ? known.types[section.model_type] : undefined;
  const fields = withDefaults(section, type);
  const written = Boolean(section.rope_parameters || section.rope_scaling || section.rope_theta || section.rotary_emb_base);
  const name = `model_type "${fields.model_type ?? "missing"}"`;
  if (fields.alibi === true || (!type && !written)) {
    const other = Object.hasOwn(OTHER_ENCODINGS, fields.model_type) ? OTHER_ENCODINGS[fields.model_type] : null;
    const encoding = fields.alibi === true ? "ALiBi" : other;
    throw new Refused(
      encoding
        ? `This config (${name}) has no rotary position embedding: it has ${encoding}. This page computes RoPE; ctxext ` +
          "extends other encodings as well: ctxext describe ./config.json"
        : `This page does not know ${name}, and the config has no rope_theta. ctxext describe ./config.json reads more.`,
    );
  }
  checkCount(fields, "max_position_embeddings", 8, MAX_TOKENS);
  checkCount(fields, "num_hidden_layers", 1, 10000);
  for (const [name, low, high] of OPTIONAL_COUNTS) if (fields[name] != null) checkCount(fields, name, low, high);
  if (fields.kv_lora_rank) checkCount(fields, "qk_rope_head_dim", 4, 2048);
  checkLayers(fields, type);
  const headDim = headDimOf(fields);
  for (const scaling of ["rope_scaling", "rope_parameters"]) {
    if (fields[scaling] != null && typeof fields[scaling] !== "object") {
      throw new Refused(`${scaling} must be an object or null, got ${JSON.stringify(fields[scaling])}. Correct the config.`);
    }
  }
  const parameters = ropeParameters(fields);
  checkParameters(parameters, Math.floor((headDim * (parameters.partial_rotary_factor ?? 1)) / 2));
  const limit = fields.max_position_embeddings;
  const inUse = ropeInUse(parameters, headDim, limit, limit + 1);
  if (inUse.dim % 2 || inUse.dim < 4 || inUse.dim > 4096) {
    throw new Refused(`Each head has ${inUse.dim} rotary dimensions; this page computes even ones from 4 to 4096. Correct head_dim.`);
  }
  const mark = section.ctxext?.original && section.ctxext.start ? section.ctxext : null;
  if (mark) checkMark(mark);
  const checkpoint = mark ? null : knownCheckpoint(fields, parameters, known.checkpoints);
  const lengths = mark ? { original: mark.original.length, trained: mark.trained, reach: mark.target } : nativeLengths(parameters, limit, checkpoint);
  let source = "max_position_embeddings of the config, which may be a target and not the trained length";
  if (mark) source = "ctxext's metadata in this config";
  if (checkpoint) source = `known as ${checkpoint.name}`;
  const theta = mark ? mark.original.rope_theta : parameters.rope_theta;
  return {
    config, section, type, fields, parameters, headDim, limit, checkpoint, source, mark, ...lengths,
    isScaled: parameters.rope_type !== "default" || mark !== null,
    isNested: section !== config,
    isPerLayer: type?.perLayer === true || isPerLayer(fields),
    turning: parameters.rope_type === "proportional" ? inUse.invFreq.filter(Boolean).length : inUse.invFreq.length,
    window: everyLayerSlides(fields, type) ? fields.sliding_window : null,
    inUse: { ...inUse, length: lengths.reach },
    unscaled: lengths.original === null ? null : plainRope(inUse.dim, theta, lengths.original),
  };
}

function isPerLayer({ rope_scaling, rope_parameters }) {
  return Object.values(rope_scaling ?? rope_parameters ?? {}).some((value) => value !== null && typeof value === "object" && !Array.isArray(value));
}

function headDimOf(fields) {
  if (fields.qk_rope_head_dim) return checkCount(fields, "qk_rope_head_dim", 4, 2048);
  if (fields.head_dim) return checkCount(fields, "head_dim", 4, 2048);
  checkCount(fields, "hidden_size", 4, 2 ** 24);
  checkCount(fields, "num_attention_heads", 1, 2 ** 16);
  return checkCount({ head_dim: Math.floor(fields.hidden_size / fields.num_attention_heads) }, "head_dim", 4, 2048);
}

function checkCount(fields, name, low, high) {
  const value = fields[name];
  if (!Number.isInteger(value) || value < low || value > high) {
    throw new Refused(`${name} must be a whole number from ${low} to ${high}, got ${JSON.stringify(value) ?? "none"}. Correct the config.`);
  }
  return value;
}

const OPTIONAL_COUNTS = [
  ["num_attention_heads", 1, 2 ** 16], ["num_key_value_heads", 1, 2 ** 16], ["vocab_size", 1, 2 ** 24],
  ["intermediate_size", 1, 2 ** 24], ["sliding_window", 0, MAX_TOKENS], ["kv_lora_rank", 1, 2 ** 20],
  ["num_kv_shared_layers", 0, 10000], ["max_window_layers", 0, 10000],
];

function checkLayers(fields, type) {
  const layers = fields.layer_types;
  if (layers != null && !(Array.isArray(layers) && layers.length === fields.num_hidden_layers && layers.every((layer) => typeof layer === "string"))) {
    throw new Refused(`layer_types must be a list of ${fields.num_hidden_layers} names, one for each layer. Correct the config.`);
  }
  if (layers == null && type?.slidesByRule && fields.use_sliding_window) {
    throw new Refused(`This page does not know which layers of ${fields.model_type} slide. Write layer_types into the config.`);
  }
}

/** The metadata that ctxext writes: lengths in whole tokens, and the base before it. */
function checkMark({ original, trained, start, target }) {
  const lengths = [original.length ?? 1, trained, start, target]; // the first is null where it is unknown
  if (!lengths.every((each) => Number.isInteger(each) && each >= 1 && each <= MAX_TOKENS) || !(original.rope_theta > 1)) {
    throw new Refused("The metadata of ctxext in this config is damaged. Paste the config.json that ctxext wrote.");
  }
}

const POSITIVE = [1e-6, 1e6];
const BOUNDS = {
  rope_theta: [1 + 1e-6, 1e30], factor: [1, 1e6], original_max_position_embeddings: [1, MAX_TOKENS],
  attention_factor: POSITIVE, beta_fast: POSITIVE, beta_slow: POSITIVE, low_freq_factor: POSITIVE, high_freq_factor: POSITIVE,
  partial_rotary_factor: [1e-6, 8],
};
const NEEDED = {
  linear: ["factor"], dynamic: ["factor"], yarn: ["factor"], llama3: ["factor", "low_freq_factor", "high_freq_factor"],
  longrope: ["short_factor", "long_factor"],
};

function checkParameters(parameters, pairs) {
  for (const [name, [low, high]] of Object.entries(BOUNDS)) {
    const value = parameters[name];
    const needed = name === "rope_theta" || (NEEDED[parameters.rope_type] ?? []).includes(name);
    if (value == null ? needed : typeof value !== "number" || !(value >= low && value <= high)) {
      throw new Refused(`${name} must be a number from ${low} to ${high}, got ${JSON.stringify(value) ?? "none"}. Correct the config.`);
    }
  }
  if (parameters.rope_type !== "longrope") return;
  for (const name of NEEDED.longrope) {
    const list = parameters[name];
    if (!Array.isArray(list) || list.length !== pairs || !list.every((each) => typeof each === "number" && each >= 1e-6)) {
      throw new Refused(`${name} must be a list of ${pairs} positive numbers, one for each pair. Correct the config.`);
    }
  }
}

/** The first row of checkpoints.toml whose every field equals the config's. */
function knownCheckpoint(fields, parameters, checkpoints) {
  const value = (name) => (["rope_theta", "factor", "rope_type"].includes(name) ? parameters[name] : fields[name]);
  const slides = (name) => (name === "sliding_window" && fields.use_sliding_window === false ? null : value(name));
  return checkpoints.find((row) => Object.entries(row.match).every(([name, expected]) => slides(name) === expected)) ?? null;
}

/** Trained length, the length before any scaling (null if unknown), and the longest length covered, in tokens. */
function nativeLengths(parameters, limit, checkpoint) {
  const trained = checkpoint?.trained_length ?? limit;
  if (parameters.rope_type === "default") return { original: trained, trained, reach: trained };
  const own = parameters.original_max_position_embeddings;
  const boltedOn = checkpoint?.scaling === "bolted-on";
  let original = parameters.rope_type === "dynamic" ? limit : own ?? null;
  if (boltedOn) original = trained;
  else if (checkpoint?.original_length) original = checkpoint.original_length;
  let reach = boltedOn ? limit : trained;
  if (parameters.rope_type === "yarn" && limit <= (own ?? trained)) {
    reach = Math.max(reach, reached(parameters.factor ?? 1, own ?? trained));
  }
  return { original, trained, reach };
}

/** `factor` times `length` in whole tokens, never more. */
function reached(factor, length) {
  return Math.floor(factor * length * (1 + 1e-12));
}

// ------------------------------------------------------------------------------------------------ the plan

/** Whether existing scaling may be composed with. */
function composes(context) {
  return context.isScaled && context.parameters.rope_type !== "dynamic" && context.parameters.rope_type !== "proportional";
}

/**
 * What a method makes of a context. `how`: { method, factor, options, existing }, existing being "compose" or
 * "replace" where the model is already scaled.
 */
function planExtension(context, { method: name, factor, options = {}, existing = "replace" }) {
  const method = METHODS[name];
  if (!(factor >= 1 && factor <= 1e6)) throw new Refused(`factor must be a number from 1 to 1e6, got ${factor}.`);
  const rope = existing === "compose" ? context.inUse : context.unscaled;
  if (rope === null) {
    throw new Refused("The length before scaling is in neither the config nor the table of known checkpoints: compose with it.");
  }
  const target = reached(factor, rope.length);
  if (target > MAX_TOKENS) throw new Refused(`${target} tokens are beyond the limit of ${MAX_TOKENS}. Lower the factor.`);
  if (context.window !== null && context.window <= rope.length) {
    throw new Refused(
      `Every layer has a sliding window of ${context.window} tokens, within the trained ${rope.length}: no distance is ` +
      `ever new, so RoPE needs no change. Just raise max_position_embeddings to ${target}.`,
    );
  }
  const used = { ...method.options, ...options };
  const lambda = method.rescale(rope, factor, used);
  const attention = method.attention?.(rope, factor, used) ?? 1;
  const plan = {
    name, factor, options: used, existing, rope, target, lambda,
    invFreq: rope.invFreq.map((each, pair) => each / lambda[pair]),
    attentionFactor: rope.attentionFactor * attention,
  };
  return { ...plan, parameters: ropeParametersOf(plan, context, method) };
}

// Keys of rope_parameters that describe a scaling; all others belong to the family.
const SCALING_KEYS = [
  "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "beta_fast",
  "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor", "short_mscale", "long_mscale",
  "low_freq_factor", "high_freq_factor",
];

/** The new rope_parameters: native where the method and the family have a form, `longrope` over plain RoPE otherwise. */
function ropeParametersOf(plan, context, method) {
  const { rope, factor } = plan;
  const own = rope.isPlain && method.parameters ? method.parameters(rope, factor, plan.options) : null;
  const allowed = context.type?.ropeTypes;
  const kept = without(context.parameters, SCALING_KEYS);
  if (own !== null && (!allowed || allowed.includes(own.rope_type))) return { ...kept, ...own };
  const plain = plainFrequencies(rope.dim, rope.theta);
  const list = plain.map((each, pair) => (each / rope.invFreq[pair]) * plan.lambda[pair]);
  const rewritten = !rope.isPlain && context.original !== null;
  return {
    ...kept, rope_type: "longrope", rope_theta: rope.theta,
    factor: rewritten ? (factor * rope.length) / context.original : factor,
    original_max_position_embeddings: rewritten ? context.original : rope.length,
    attention_factor: plan.attentionFactor, short_factor: list, long_factor: [...list],
  };
}

function without(fields, names) {
  return Object.fromEntries(Object.entries(fields).filter(([name]) => !names.includes(name)));
}

// -------------------------------------------------------------------------------------------------- phases

/** The largest angle in radians that each pair has reached in training. */
function trainedPhases(context) {
  const before = (context.unscaled ?? context.inUse).invFreq;
  if (context.checkpoint?.scaling !== "trained-in" || context.unscaled === null) {
    return before.map((each) => each * (context.unscaled ?? context.inUse).length);
  }
  return before.map((each, pair) => Math.max(context.inUse.invFreq[pair] * context.trained, each * context.original));
}

/**
 * Each pair's angle at the target over its largest in training; null for a pair that finished a turn in training and
 * has seen every phase.
 */
function phaseRatios(context, invFreq, target) {
  return trainedPhases(context).map((trained, pair) => (trained >= TURN ? null : (invFreq[pair] * target) / trained));
}

// -------------------------------------------------------------------------------------------------- memory

/** The types of the layers with softmax attention, which have a KV cache. */
function attentionLayers(fields, type) {
  const pattern = fields.layer_types ?? type?.layerPattern;
  const layers = Array.from(
    { length: fields.num_hidden_layers }, (_, layer) => pattern?.[layer % pattern.length] ?? defaultLayer(fields, type, layer),
  );
  return layers.filter((layer) => layer === "hybrid" || (layer.includes("attention") && layer !== "linear_attention"));
}

function defaultLayer(fields, type, layer) {
  const first = type?.slidesFrom === undefined ? 0 : fields.max_window_layers ?? type.slidesFrom;
  return fields.sliding_window && fields.use_sliding_window !== false && layer >= first ? "sliding_attention" : "full_attention";
}

function everyLayerSlides(fields, type) {
  return attentionLayers(fields, type).every((layer) => layer === "sliding_attention") && Boolean(fields.sliding_window);
}

/** Bytes of the KV cache of one sequence; sliding layers count their window. */
function kvCacheBytes({ fields, type, headDim }, tokens, bytesEach) {
  const layers = attentionLayers(fields, type);
  const numbers = fields.kv_lora_rank
    ? fields.kv_lora_rank + fields.qk_rope_head_dim
    : 2 * keyValueHeads(fields) * headDim;
  const windows = { sliding_attention: fields.sliding_window, chunked_attention: fields.attention_chunk_size };
  return layers.slice(0, layers.length - (fields.num_kv_shared_layers ?? 0))
    .map((layer) => Math.min(tokens, windows[layer] || tokens))
    .reduce((sum, cached) => sum + cached * numbers * bytesEach, 0);
}

function keyValueHeads(fields) {
  if (fields.multi_query && !fields.new_decoder_architecture) return 1; // Falcon
  return fields.num_key_value_heads ?? fields.num_attention_heads;
}

// Decoders of attention and gated MLP, with or without experts, whose weights the sizes of the config give.
const COUNTED = [
  "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2",
  "smollm3", "granite", "glm4",
];

/** How many weights a config describes; null where this page does not know the architecture. */
function parameterCount({ fields, headDim }) {
  const { hidden_size: hidden, intermediate_size: inner, num_hidden_layers: layers, vocab_size: vocabulary } = fields;
  if (!COUNTED.includes(fields.model_type) || ![hidden, inner, layers, vocabulary].every(Number.isInteger)) return null;
  const heads = 2 * fields.num_attention_heads + 2 * (fields.num_key_value_heads ?? fields.num_attention_heads);
  const experts = fields.num_local_experts ?? fields.num_experts ?? 0;
  const width = experts ? fields.moe_intermediate_size ?? inner : inner;
  const mlp = 3 * hidden * width * Math.max(experts, 1) + hidden * experts;
  const embeddings = vocabulary * hidden * (fields.tie_word_embeddings ? 1 : 2);
  return embeddings + layers * (hidden * heads * headDim + mlp + 2 * hidden) + hidden;
}
