// What each engine needs to serve a plan: its config.json, its command line, and what it ignores. The same rules as
// ctxext/export/rules.py, for models with one rope table and ordinary attention; the tests compare every answer. The
// words of the notes are known.js's readings, generated from ctxext/export/readings.py.
"use strict";

const SERVER_ENGINES = ["vllm", "sglang"];
const LENGTH_FIELDS = [
  "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length", "max_seq_length", "seq_len",
];
const PHI3_LIKE = (context) => context.type?.ropeTypes?.length === 2; // default and longrope alone
const TWO_FIELD_TYPES = ["chameleon", "fuyu", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmo", "olmo2"];
const INTERLEAVED_TYPES = ["cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"];
const MLX_TYPES = ["llama", "mistral", "qwen2", "qwen3", "phi3"];
const READ_TYPES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_oss"]; // of ExLlamaV3, LMDeploy and OpenVINO
const ORT_LIKE_LLAMA = ["llama", "mistral", "qwen2", "phi3"];
const ORT_TYPES = [...ORT_LIKE_LLAMA, "qwen3"];
// llama.cpp's architectures by model type, whether a file can hold a factor for each pair, and whether flags miss layers.
const GGUF_ARCHITECTURES = {
  llama: ["llama", true], mistral: ["llama", true], mixtral: ["llama", true], granite: ["granite", true],
  phi3: ["phi3", true], qwen2: ["qwen2", false], qwen3: ["qwen3", false], qwen3_moe: ["qwen3moe", false],
  gpt_oss: ["gpt-oss", false, true],
};
const SUPPORTED_GGUF = "llama, granite, phi3, qwen2, qwen3, qwen3_moe, gemma3_text, gpt_oss, mistral, mixtral";
const WITHOUT_WINDOWS = Object.keys(GGUF_ARCHITECTURES).filter((type) => type !== "gpt_oss");
const WINDOWLESS_TYPES = {
  mlx: ["mistral", "qwen2", "qwen3", "phi3"], sglang: ["llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3"],
  exllamav3: ["mistral", "qwen2", "qwen3", "phi3"], "onnxruntime-genai": ORT_TYPES,
  "llama.cpp": WITHOUT_WINDOWS, ollama: WITHOUT_WINDOWS,
};
const ENGINE_NAMES = {
  transformers: "transformers 5", "transformers-v4": "transformers 4", vllm: "vLLM", sglang: "SGLang", "llama.cpp": "llama.cpp",
  ollama: "Ollama", mlx: "mlx-lm", exllamav3: "ExLlamaV3", lmdeploy: "LMDeploy", "onnxruntime-genai": "ONNX Runtime GenAI",
  openvino: "OpenVINO",
};

/** Why this page leaves a model's engines to `ctxext export`; null if it knows them. */
function whyNotServed(context) {
  if (!context.type) return `the model type "${context.fields.model_type}" is not one that this page knows`;
  if (context.isNested) return "its text model is part of a larger config";
  if (context.isPerLayer) return "it has one rope table for each type of layer";
  if (!context.type.served || "mrope_section" in context.parameters || "llama_4_scaling_beta" in context.parameters) {
    return "its family reads RoPE in its own way";
  }
  return null;
}

/** The config.json of the extended model for transformers 5 and 4, as `ctxext extend` writes it. */
function extendedConfig(context, plan, known) {
  const { section, type, fields } = context;
  const own = (name) => type?.names?.[name] ?? name;
  const updates = { rope_parameters: plan.parameters, [own("max_position_embeddings")]: plan.target };
  const original = context.original ?? plan.rope.length;
  if (type?.hasOriginal || "original_max_position_embeddings" in section) updates.original_max_position_embeddings = original;
  const isNull = section.head_dim === null && !type?.headDimDerived; // where the config's class derives it, null stays
  if ((type?.headDimLeftOut && fields.head_dim == null) || isNull) updates.head_dim = context.headDim;
  const theta = context.mark ? context.mark.original.rope_theta : context.parameters.rope_theta;
  const method = { ...structuredClone(known.methods[plan.name]), factor: plan.factor, ...plan.options };
  if (method.rounds) method.rounds.factor = plan.factor;
  updates.ctxext = {
    version: known.version, method, existing: plan.existing, original: { length: context.original, rope_theta: theta },
    trained: plan.existing === "replace" ? plan.rope.length : context.trained, start: plan.rope.length, target: plan.target,
    factor: plan.factor, fields: { rope_parameters: plan.parameters },
  };
  return structuredClone({ ...section, ...updates });
}

/** rope_theta, partial_rotary_factor and rope_scaling as transformers 4 reads them. */
function version4Keys(context, parameters) {
  const keys = {};
  for (const name of ["rope_theta", "partial_rotary_factor"]) {
    if (!(name in parameters)) continue;
    keys[name] = parameters[name];
    const older = context.type?.names?.[name];
    if (older) keys[older] = parameters[name];
  }
  const more = Object.keys(parameters).some((name) => name !== "rope_type" && !(name in keys));
  if (parameters.rope_type !== "default" || context.type?.scaledByDefault || more) keys.rope_scaling = { ...parameters };
  return keys;
}

/**
 * What `engine` needs: { command: the words of the command line, config, notes, length }, or { refused: why }.
 * `model` is the checkpoint on the command line; `folder` that of its copy for engines that need another config.json.
 */
function exportFor(engine, context, plan, known, model, folder) {
  try {
    const found = exported(engine, context, plan, known, model, folder);
    const lost = "the model's own scaling, which it was trained with, is replaced: ctxext lint calls that wrong.";
    return undoes(context, plan) ? { ...found, notes: [lost, ...found.notes] } : found;
  } catch (error) {
    if (error instanceof Refused) return { refused: error.message };
    throw error;
  }
}

/** Whether pairs that the checkpoint's own scaling slows are faster in the plan. */
function undoes({ mark, checkpoint, inUse, parameters, unscaled }, plan) {
  if (mark || checkpoint?.scaling === "bolted-on") return false;
  const plain = unscaled?.invFreq ?? plainFrequencies(inUse.dim, parameters.rope_theta);
  return inUse.invFreq.some((own, pair) => own < plain[pair] / 1.05 && plan.invFreq[pair] > own * 1.05);
}

function exported(engine, context, plan, known, model, folder) {
  const { parameters, target } = plan, type = context.fields.model_type, kind = parameters.rope_type;
  const config = extendedConfig(context, plan, known);
  const reading = (name) => known.readings[name];
  const notes = (names) => [...new Set(names)].map((name) => `${reading(name)}.`);
  const window = attentionLayers(context.fields, context.type).includes("sliding_attention") ? context.fields.sliding_window : null;
  if (window && window < target && WINDOWLESS_TYPES[engine]?.includes(type)) {
    const why = reading(`${engine}-window`) ?? `${engine} was not run with a sliding window`;
    throw new Refused(`${why}. Nearest: a target of ${window} tokens, or vLLM.`);
  }
  if (engine.startsWith("transformers") || engine === "openvino") {
    if (engine === "openvino" && !READ_TYPES.includes(type)) {
      throw new Refused(`optimum-intel's export of ${type} was not run, or fails (run: ${READ_TYPES.join(", ")}). Nearest: transformers, or vLLM.`);
    }
    if (engine === "openvino" && kind === "longrope" && type === "gpt_oss") {
      throw new Refused("optimum-intel's export fails for longrope of gpt_oss. Nearest: 'yarn', 'ntk' or 'pi'.");
    }
    const names = forTransformers(engine, context, plan, config, reading);
    if (engine !== "openvino") return { command: [], config, notes: notes(names), length: target };
    return { command: openvinoCommand(folder), config, notes: notes(kind === "longrope" ? ["openvino-longrope"] : []), length: target };
  }
  if (engine === "llama.cpp" || engine === "ollama") {
    return { ...forLlamaCpp(engine, context, plan, model, reading, notes), config: null, length: target };
  }
  if (SERVER_ENGINES.includes(engine)) {
    const names = forServer(engine, context, plan, config, reading);
    return { ...serverCommand(engine, context, plan, config, model, reading, notes(names)), config, length: target };
  }
  const write = { mlx: forMlx, exllamav3: forLengths, lmdeploy: forLengths, "onnxruntime-genai": forOnnx }[engine];
  const names = write(context, plan, config, reading, engine);
  const command = {
    mlx: ["mlx_lm.server", "--model", folder],
    lmdeploy: ["lmdeploy", "serve", "api_server", folder, "--backend", "pytorch", "--session-len", String(target)],
    exllamav3: [],
    "onnxruntime-genai": [
      "python", "-m", "onnxruntime_genai.models.builder", "--input", folder, "--output", `${folder}-onnx`, "--precision", "fp32",
      "--execution_provider", "cpu",
    ],
  }[engine];
  return { command, config, notes: notes(names), length: target };
}

function openvinoCommand(folder) {
  return ["optimum-cli", "export", "openvino", "--model", folder, "--task", "text-generation-with-past", `${folder}-openvino`];
}

/** The target^(1 / scale²) for which sqrt(1 + ln(target / original) / ln(original)) is `scale`. */
function originalFor(scale, target, why) {
  if (scale < 1) throw new Refused(`${why}, and no two lengths give ${general(scale, 4)}. Nearest: transformers 5.`);
  const original = target ** (1 / scale ** 2);
  return close(original, Math.round(original)) ? Math.round(original) : original;
}

function close(one, other) {
  return Math.abs(one - other) <= 1e-9 * Math.max(Math.abs(one), Math.abs(other));
}

// ------------------------------------------------------------------------------------------ engine by engine

function forTransformers(engine, context, { parameters, target, attentionFactor }, config, reading) {
  const kind = parameters.rope_type, older = version4Keys(context, parameters);
  delete config.rope_scaling;
  Object.assign(config, older);
  const threeFields = PHI3_LIKE(context) && kind === "longrope";
  const twoFields = TWO_FIELD_TYPES.includes(context.fields.model_type) && kind !== "default";
  if (engine !== "transformers-v4") {
    return [...(threeFields ? ["transformers-4-phi3"] : []), ...(twoFields ? ["transformers-4-olmo"] : [])];
  }
  if (twoFields && !["linear", "dynamic"].includes(kind)) {
    throw new Refused(`${reading("transformers-4-olmo")}. Nearest: 'ntk' or 'pi', or transformers 5.`);
  }
  if (twoFields || threeFields) delete config.rope_parameters;
  if (twoFields) config.rope_scaling = { type: kind, factor: parameters.factor };
  if (threeFields) {
    config.rope_scaling = { type: "longrope", short_factor: parameters.short_factor, long_factor: parameters.long_factor };
    config.original_max_position_embeddings = originalFor(attentionFactor, target, reading("transformers-4-phi3"));
  }
  return [];
}

function forServer(engine, context, plan, config, reading) {
  const { target, attentionFactor } = plan, type = context.fields.model_type, kind = plan.parameters.rope_type;
  const names = [], yarn = "Nearest: 'yarn', with --existing replace if the model is already scaled.";
  if (kind === "yarn" && engine === "vllm") {
    const rows = yarnRows(plan.parameters);
    if (rows < target) {
      throw new Refused(`${reading("vllm-yarn-rows")} (here ${rows}), fewer than the target of ${target}. Nearest: a target of ${rows} tokens, or --existing compose.`);
    }
  }
  if (engine === "vllm" && type === "gpt_oss" && !(kind === "yarn" && close(attentionFactor, yarnGrowth(plan.parameters.factor)))) {
    throw new Refused(`${reading("vllm-gpt-oss")}. ${yarn}`);
  }
  if (kind === "longrope" && INTERLEAVED_TYPES.includes(type)) {
    throw new Refused(`${reading(`${engine}-longrope-pairs`)}, and ${type} has these. ${yarn}`);
  }
  let parameters = { ...plan.parameters };
  if (kind === "yarn") {
    if ("attention_factor" in parameters) names.push(`${engine}-attention-factor`);
    parameters = without(parameters, ["mscale", "mscale_all_dim", "attention_factor", "attn_factor"]);
    const usual = yarnGrowth(parameters.factor);
    if (!close(attentionFactor, usual)) {
      Object.assign(parameters, { attention_factor: attentionFactor, attn_factor: attentionFactor / usual });
    }
  } else if (kind === "longrope") {
    names.push(`${engine}-longrope`);
    Object.assign(parameters, { short_mscale: attentionFactor, long_mscale: attentionFactor });
    if (engine === "sglang") parameters.original_max_position_embeddings = target;
  } else if (kind === "linear" && context.original !== null) {
    parameters.original_max_position_embeddings ??= context.original; // for readers, as vLLM ignores it
  }
  for (const name of ["rope_scaling", "rope_theta", "ctxext"]) delete config[name];
  config.rope_parameters = parameters;
  const older = version4Keys(context, parameters);
  Object.assign(config, engine === "vllm" ? older : without(older, ["rope_theta", "rope_scaling"]));
  if (engine === "vllm" && (PHI3_LIKE(context) || TWO_FIELD_TYPES.includes(type))) delete config.rope_scaling;
  const isFixed = engine === "sglang" && "original_max_position_embeddings" in parameters;
  const multiplied = kind === "linear" && !isFixed;
  const length = multiplied ? Math.ceil(target / parameters.factor) : target;
  config[context.type.names?.max_position_embeddings ?? "max_position_embeddings"] = length;
  for (const name of LENGTH_FIELDS) if (config[name] != null) config[name] = length;
  if ("original_max_position_embeddings" in config && "original_max_position_embeddings" in parameters) {
    config.original_max_position_embeddings = parameters.original_max_position_embeddings;
  }
  return names;
}

/** Positions in the servers' table of yarn. */
function yarnRows(parameters) {
  return Math.ceil(parameters.original_max_position_embeddings * parameters.factor);
}

function serverCommand(engine, context, plan, config, model, reading, notes) {
  const { parameters, target } = plan, short = parameters.rope_type === "yarn" && yarnRows(parameters) < target;
  const last = engine === "sglang" && short ? [`${reading("sglang-yarn-rows")}.`] : [];
  const changed = changes(context.section, config), isLeft = leftByMerge(context, config.rope_parameters);
  if (engine === "vllm") {
    if (context.section.rope_scaling && !("rope_scaling" in config)) changed.rope_scaling = config.rope_parameters;
    const command = ["vllm", "serve", model, "--max-model-len", String(target)];
    return { command: withOverrides(command, "--hf-overrides", changed), notes, overrides: changed };
  }
  const command = ["python", "-m", "sglang.launch_server", "--model-path", model, "--context-length", String(target)];
  if (isLeft && Object.keys(changed).length) {
    const why = `${reading("sglang-overrides-merged")}: replace the checkpoint's config.json by the export.`;
    return { command, notes: [...notes, why, ...last] };
  }
  return { command: withOverrides(command, "--json-model-override-args", changed), notes: [...notes, ...last], overrides: changed };
}

function withOverrides(command, option, changed) {
  return Object.keys(changed).length ? [...command, option, toJson(changed)] : command;
}

/** The keys of `config` that are new or have another value than in `source`. */
function changes(source, config) {
  const isNew = ([name, value]) => name !== "ctxext" && JSON.stringify(source[name]) !== JSON.stringify(value);
  return Object.fromEntries(Object.entries(config).filter(isNew));
}

/** Whether keys of the checkpoint's rope_parameters would stay where the new ones are merged into them. */
function leftByMerge(context, parameters) {
  const ofLlama3 = ["low_freq_factor", "high_freq_factor"];
  const written = context.fields.rope_scaling ?? context.fields.rope_parameters ?? {}; // with "type", the older rope_type
  return Object.keys({ ...written, ...context.parameters }).some((name) => !(name in parameters) && !ofLlama3.includes(name));
}

function forMlx(context, plan, config, reading) {
  const { parameters, target, attentionFactor: scale } = plan, type = context.fields.model_type, kind = parameters.rope_type;
  if (!MLX_TYPES.includes(type)) {
    throw new Refused(
      `mlx-lm's class for ${type} was not run (run: ${[...MLX_TYPES, "gemma3_text", "gemma3"].join(", ")}). Check it yourself: ` +
      "compare log-probabilities with those in a probe of ctxext verify.",
    );
  }
  for (const name of ["rope_scaling", "rope_parameters", "original_max_position_embeddings", "ctxext"]) delete config[name];
  config.rope_theta = parameters.rope_theta;
  config.max_position_embeddings = target;
  if ("partial_rotary_factor" in parameters) {
    if (type !== "phi3") throw new Refused(`mlx-lm's class for ${type} reads no partial_rotary_factor. Nearest: vLLM.`);
    config.partial_rotary_factor = parameters.partial_rotary_factor;
  }
  if (kind === "default") return ["mlx-config"];
  const names = ["mlx-config"], factor = parameters.factor ?? 1;
  let rope_type = kind, scaling;
  if ((kind === "linear" || kind === "llama3") && !PHI3_LIKE(context)) {
    scaling = without(parameters, ["rope_theta", "partial_rotary_factor"]);
  } else if (kind === "yarn" && (parameters.truncate ?? true) && factor > 1) {
    scaling = { factor, original_max_position_embeddings: parameters.original_max_position_embeddings };
    for (const beta of ["beta_fast", "beta_slow"]) if (parameters[beta] != null) scaling[beta] = parameters[beta];
    if (!close(scale, yarnGrowth(factor))) {
      Object.assign(scaling, { mscale: (scale - 1) / (0.1 * Math.log(factor)), mscale_all_dim: 0 });
      names.push("mlx-attention-factor");
    }
  } else {
    names.push(kind === "yarn" ? "mlx-truncate" : "mlx-longrope");
    const original = originalFor(scale, target, reading("mlx-longrope"));
    if (PHI3_LIKE(context)) config.original_max_position_embeddings = wholeOriginal(original, scale, type, reading("mlx-longrope"));
    const factors = lambdaOverPlain(plan);
    scaling = { short_factor: factors, long_factor: factors, original_max_position_embeddings: original };
    rope_type = "longrope";
  }
  config.rope_scaling = { rope_type, type: rope_type, ...without(scaling, ["rope_type"]) };
  return names;
}

function wholeOriginal(original, scale, type, why) {
  if (Number.isInteger(original)) return original;
  throw new Refused(`${why}, and ${type} takes a whole number there, none of which gives ${general(scale, 4)}. Nearest: 'pi' or 'ntk'.`);
}

/** λ over plain RoPE of the config's base, existing scaling included. */
function lambdaOverPlain({ rope, invFreq, parameters }) {
  return plainFrequencies(rope.dim, parameters.rope_theta).map((each, pair) => each / invFreq[pair]);
}

function forLengths(context, plan, config, reading, engine) {
  const { target, attentionFactor: scale } = plan, type = context.fields.model_type;
  if (!READ_TYPES.includes(type)) {
    throw new Refused(`${engine}'s class for ${type} was not read (read: ${READ_TYPES.join(", ")}). Nearest: vLLM.`);
  }
  let parameters = { ...plan.parameters }, kind = parameters.rope_type, length = target;
  const names = [];
  for (const name of ["rope_scaling", "original_max_position_embeddings", "ctxext"]) delete config[name];
  if (kind === "yarn") parameters.attention_factor = scale;
  if (engine === "exllamav3" && kind === "yarn") {
    names.push("exllamav3-yarn");
    const product = parameters.original_max_position_embeddings * parameters.factor;
    if (Number.isInteger(product) && product >= target) length = product;
    else kind = "longrope";
  }
  if (kind === "longrope") {
    const why = `${engine}-longrope`, factors = lambdaOverPlain(plan);
    names.push(why);
    const original = originalFor(scale, target, reading(why));
    if (engine === "lmdeploy" && PHI3_LIKE(context)) {
      config.original_max_position_embeddings = wholeOriginal(original, scale, type, reading(why));
    }
    const kept = Object.fromEntries(["rope_theta", "partial_rotary_factor"].filter((name) => name in parameters).map((name) => [name, parameters[name]]));
    parameters = {
      ...kept, rope_type: "longrope", short_factor: factors, long_factor: factors, original_max_position_embeddings: original,
      attention_factor: scale,
    };
  }
  config.rope_parameters = parameters;
  config.max_position_embeddings = length;
  config.rope_theta = parameters.rope_theta;
  return names;
}

function forOnnx(context, plan, config, reading) {
  const { parameters, target, attentionFactor: scale } = plan, type = context.fields.model_type, kind = parameters.rope_type;
  if (!ORT_TYPES.includes(type)) {
    throw new Refused(`ONNX Runtime GenAI's builder was not run with ${type} (run: ${ORT_TYPES.join(", ")}). Nearest: openvino, or vLLM.`);
  }
  const theta = parameters.rope_theta, names = [];
  let original = Math.trunc(parameters.original_max_position_embeddings ?? target);
  const found = { rope_type: kind, rope_theta: theta };
  if ("partial_rotary_factor" in parameters) {
    found.partial_rotary_factor = config.partial_rotary_factor = parameters.partial_rotary_factor;
  }
  const whole = plan.rope.dim === context.headDim;
  const ends = kind === "yarn" && whole ? rampEnds(parameters, plainRope(plan.rope.dim, theta, original)) : null;
  if (kind === "default") {
    original = target;
  } else if (kind === "llama3" && type === "llama") {
    const { factor, low_freq_factor, high_freq_factor } = parameters;
    Object.assign(found, { factor, low_freq_factor, high_freq_factor });
  } else if (kind === "linear" && type !== "phi3") {
    found.factor = parameters.factor;
    original = target;
  } else if (ends && type !== "phi3") {
    const [fast, slow] = ends.map((end) => original / (TURN * theta ** ((2 * end) / plan.rope.dim)));
    Object.assign(found, { factor: parameters.factor, beta_fast: fast, beta_slow: slow, mscale: scale });
    names.push("onnxruntime-genai-yarn");
  } else if (ORT_LIKE_LLAMA.includes(type)) {
    const factors = lambdaOverPlain(plan);
    original = Math.min(original, target - 1);
    Object.assign(found, {
      rope_type: "longrope", type: "longrope", short_factor: factors, long_factor: factors, short_mscale: scale,
      long_mscale: scale, factor: target / original, attention_factor: scale,
    });
    names.push("onnxruntime-genai-longrope");
  } else {
    throw new Refused(
      `${reading("onnxruntime-genai-types")}, so ${kind} cannot be written for ${type} here. Nearest: 'yarn' with its usual betas, 'ntk' or 'pi'.`,
    );
  }
  if (type !== "phi3" && found.rope_type === "longrope") config.architectures = ["Phi3ForCausalLM"];
  else if (type === "llama" && ["linear", "yarn"].includes(found.rope_type)) config.architectures = ["MistralForCausalLM"];
  if (type === "llama" && kind !== "default") names.unshift("onnxruntime-genai-class");
  for (const name of ["rope_scaling", "original_max_position_embeddings", "ctxext"]) delete config[name];
  Object.assign(config, { rope_parameters: found, rope_theta: theta, max_position_embeddings: target });
  if (original !== target || type === "phi3") found.original_max_position_embeddings = config.original_max_position_embeddings = original;
  return names;
}

/** The ends of yarn's ramp in pairs, rounded where transformers rounds; null if the builder rejects them. */
function rampEnds(parameters, rope) {
  let [low, high] = [correctionDim(parameters.beta_fast || 32, rope), correctionDim(parameters.beta_slow || 1, rope)];
  if (parameters.truncate ?? true) [low, high] = [Math.floor(low), Math.ceil(high)];
  return low > 0 && low < high && high < rope.dim / 2 - 1 ? [low, high] : null;
}

function forLlamaCpp(engine, context, plan, model, reading, notes) {
  const { parameters, target, attentionFactor } = plan, type = context.fields.model_type, kind = parameters.rope_type;
  const held = engine === "ollama"
    ? ["ollama", "create", "NAME", "-f", "OUT.Modelfile"] : ["llama-server", "-m", "OUT.gguf", "--ctx-size", String(target)];
  if (!(type in GGUF_ARCHITECTURES)) throw new Refused(`llama.cpp's graph for ${type} is not supported (supported: ${SUPPORTED_GGUF}). Nearest: convert the extended folder with llama.cpp's convert_hf_to_gguf.py, and verify the file.`);
  const [architecture, takesFactors, missesLayers] = GGUF_ARCHITECTURES[type];
  const truncated = parameters.truncate ?? true, beta = (name, paper) => parameters[name] || paper;
  const nearest = `Nearest for ${type}: 'yarn' as in the paper, 'ntk' or 'pi'.`;
  const ratio = kind === "yarn" ? attentionFactor / yarnGrowth(parameters.factor ?? 1) : 1;
  const inFlags = kind === "default" || kind === "linear" || (kind === "yarn" && truncated);
  const inKeys = inFlags && beta("beta_fast", 32) === 32 && beta("beta_slow", 1) === 1;
  if (!inFlags || missesLayers || engine === "ollama") {
    if (!takesFactors && !inKeys) throw new Refused(`${reading(truncated ? "llama.cpp-factors" : "llama.cpp-truncate")}. ${nearest}`);
    const how = writesGguf(context)
      ? `write it with ctxext export, --engine ${engine} -o OUT.gguf`
      : "convert the original with llama.cpp's convert_hf_to_gguf.py, and extend that file, ctxext export MODEL.gguf " +
        `--engine ${engine} … -o OUT.gguf`;
    const missed = missesLayers ? notes(["llama.cpp-flags-windows"]) : [];
    return { command: held, notes: [`the frequencies are stored in the file: ${how}.`, ...missed] };
  }
  if (context.parameters.rope_type !== "default" && JSON.stringify(context.parameters) !== JSON.stringify(parameters)) {
    throw new Refused(
      `${reading("llama.cpp-scaled-file")}. Nearest: extend the file itself: ctxext export MODEL.gguf --engine llama.cpp ` +
      "--existing replace … -o OUT.gguf.",
    );
  }
  const command = ["llama-server", "-m", "MODEL.gguf", "--ctx-size", String(target)];
  const names = [];
  let keys = `${architecture}.context_length=int:${target}`;
  if (kind === "default" || context.parameters.rope_theta !== parameters.rope_theta) {
    command.push("--rope-freq-base", general(parameters.rope_theta, 9));
  }
  if (kind !== "default") command.push("--rope-scaling", kind, "--rope-scale", general(parameters.factor, 9));
  if (kind === "yarn") {
    command.push("--yarn-orig-ctx", String(parameters.original_max_position_embeddings));
    for (const [name, paper] of [["beta_fast", 32], ["beta_slow", 1]]) {
      if (beta(name, paper) !== paper) command.push(`--yarn-${name.replace("_", "-")}`, general(parameters[name], 9));
    }
    if (!close(ratio, 1)) {
      keys += `,${architecture}.rope.scaling.attn_factor=float:${general(ratio, 9)}`;
      names.push("llama.cpp-attn-flag");
    }
  }
  const asItWas = "MODEL.gguf is the file of the unextended model; a file of the extended one already holds the extension.";
  return { command: [...command, "--override-kv", keys], notes: [asItWas, ...notes(names)] };
}

/** Whether ctxext writes a GGUF file from a checkpoint of this kind. */
function writesGguf({ fields, headDim, inUse, limit }) {
  const isLlama = fields.model_type === "llama" || fields.model_type === "mistral";
  const slides = fields.sliding_window != null && fields.sliding_window < limit;
  return isLlama && !slides && (fields.hidden_act ?? "silu") === "silu" && inUse.dim === headDim;
}

// ------------------------------------------------------------------------------------------------- as text

// Written with a decimal point even where they are whole, as Python writes a float.
const FLOATS = new Set([
  "factor", "rope_theta", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "attention_factor", "attn_factor",
  "mscale", "short_mscale", "long_mscale", "short_factor", "long_factor",
]);

/** JSON as Python writes it: on one line, or, with an `indent` such as "", a line for each key. */
function toJson(value, indent = null, name = "") {
  if (Array.isArray(value)) return `[${value.map((each) => toJson(each, null, name)).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const inner = indent === null ? null : `${indent}  `;
    const lines = Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${toJson(each, inner, key)}`);
    if (indent === null || !lines.length) return `{${lines.join(", ")}}`;
    return `{\n${lines.map((line) => inner + line).join(",\n")}\n${indent}}`;
  }
  const text = JSON.stringify(value);
  return FLOATS.has(name) && Number.isInteger(value) && !text.includes("e") ? `${text}.0` : text;
}

/** A number with at most `digits` significant digits, without trailing zeros: Python's g. */
function general(value, digits) {
  const exponent = Math.floor(Math.log10(Math.abs(value)));
  if (exponent >= -4 && exponent < digits) return String(Number(value.toPrecision(digits)));
  return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace(/e([+-])(\d)$/, "e$10$2");
}

/** A shell command with one option per line. */
function commandLines(words) {
  const lines = [];
  for (const word of words) {
    const quoted = /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
    if (lines.length && !word.startsWith("--")) lines[lines.length - 1] += ` ${quoted}`;
    else lines.push(quoted);
  }
  return lines.join(" \\\n  ");
}
