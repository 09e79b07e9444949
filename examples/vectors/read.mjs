// Reads vectors (docs/vectors.md) and holds an attention of its own against them: node read.mjs FOLDER
// It computes in float64 and rounds once, so that every number has to be within the bounds of "native".
import { openSync, readFileSync, readSync } from "node:fs";
import { join } from "node:path";

const folder = process.argv[2];
const file = openSync(join(folder, "vectors.safetensors"));
const TYPES = { float64: Float64Array, float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };

function arrayAt({ offset, bytes }, dtype) {
  const data = new ArrayBuffer(bytes);
  readSync(file, new Uint8Array(data), 0, bytes, offset);
  return new TYPES[dtype](data);
}

// Element (b, h, i, j) of a mask or bias, whose axes of length 1 stand for all.
function spread(array, at) {
  const place = array.shape.reduce((sum, length, axis) => sum * length + (length === 1 ? 0 : at[axis]), 0);
  return array.data[place];
}

function attention({ query, key, value, mask, bias }, { is_causal = false, scale }) {
  const [B, H, L, D] = query.shape, [, G, S] = key.shape, W = value.shape[3];
  const factor = scale ?? 1 / Math.sqrt(D), output = new Float64Array(B * H * L * W);
  for (let b = 0; b < B; b++) for (let h = 0; h < H; h++) for (let i = 0; i < L; i++) {
    const row = (b * H + h) * L + i, head = b * G + Math.floor(h / (H / G)), scores = [];
    for (let j = 0; j < S; j++) {
      let dot = 0;
      for (let d = 0; d < D; d++) dot += query.data[row * D + d] * key.data[(head * S + j) * D + d];
      dot = dot * factor + (bias ? spread(bias, [b, h, i, j]) : 0);
      scores.push((is_causal && j > i) || (mask && !spread(mask, [b, h, i, j])) ? -Infinity : dot);
    }
    const top = Math.max(...scores), shift = top === -Infinity ? 0 : top;
    const powers = scores.map((score) => Math.exp(score - shift)), total = powers.reduce((sum, each) => sum + each, 0);
    for (let d = 0; d < W; d++) {
      let mean = 0;
      powers.forEach((power, j) => { if (power !== 0) mean += power * value.data[(head * S + j) * W + d]; });
      output[row * W + d] = total === 0 ? 0 : mean / total; // a query without a key gets zeros
    }
  }
  return output;
}

let right = 0, wrong = 0, skipped = 0;
for (const line of readFileSync(join(folder, "vectors.jsonl"), "utf8").trim().split("\n")) {
  const vector = JSON.parse(line);
  const known = { inputs: ["query", "key", "value", "mask", "bias"], options: ["is_causal", "scale"] };
  const isKnown = vector.function === "attention" && vector.dtype in TYPES
    && vector.inputs.every(({ name }) => known.inputs.includes(name))
    && Object.keys(vector.options).every((name) => known.options.includes(name));
  if (!isKnown) { skipped++; continue; }
  const inputs = Object.fromEntries(vector.inputs.map(({ name, dtype, shape, data }) =>
    [name, { shape, data: arrayAt(data, dtype) }]));
  const stage = vector.stages.find(({ name }) => name === "output");
  const [exact, low, bound] = [stage.exact, stage.low, stage.bounds.native].map((each) => arrayAt(each, "float64"));
  const output = TYPES[stage.dtype].from(attention(inputs, vector.options));
  const isRight = output.every((number, i) => bound[i] === Infinity || Object.is(number + 0, exact[i])
    || Math.abs(number - exact[i] - low[i]) <= bound[i]);
  isRight ? right++ : wrong++;
  if (!isRight) console.log("wrong", vector.id, vector.dtype);
}
console.log(`${right} right, ${wrong} wrong, ${skipped} skipped`);
process.exit(wrong || !right ? 1 : 0);
