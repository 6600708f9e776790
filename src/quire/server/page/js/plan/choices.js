// What is planned: fields with their defaults, and the same as a part of the address, so that a plan can be shared as a link.

const text = (value) => value;
const whole = (least) => (value) => (/^\d{1,9}$/.test(value) && Number(value) >= least ? Number(value) : undefined);
const number = (value) => (value !== "" && Number(value) >= 0 && Number(value) <= 1e6 ? Number(value) : undefined);

/** name -> [default, how it is read]. "": the model that is served, this machine, as the server has it. */
const FIELDS = {
  shape: ["", text],
  format: ["", text],
  kv_cache_dtype: ["", text],
  hardware: ["", text],
  tp: [1, whole(1)],
  users: [4, whole(1)],
  context: [4096, whole(1)],
  prompt: [null, whole(1)],
  output: [null, whole(1)],
  loras: [null, whole(0)],
  rank: [null, whole(1)],
  price: [null, number],
};

export const defaults = () => Object.fromEntries(Object.entries(FIELDS).map(([name, [value]]) => [name, value]));

/** Of a text that was typed: undefined where it cannot be one. */
export const read = (name, value) => FIELDS[name][1](value);

/** What is not in the address, or cannot be, is as it is by default. */
export function fromAddress(query) {
  const choices = defaults();
  for (const [name, value] of new URLSearchParams(query)) {
    if (name in FIELDS && value.length <= 64) choices[name] = read(name, value) ?? choices[name];
  }
  return choices;
}

export function toAddress(choices) {
  const query = new URLSearchParams();
  for (const [name, [byDefault]] of Object.entries(FIELDS)) {
    if (choices[name] !== byDefault) query.set(name, choices[name]);
  }
  return query.size ? `#plan?${query}` : "#plan";
}

/** A prompt of 1,024 tokens and an output of 256, or what a short context has room for. */
export const promptOf = ({ prompt, context }) => prompt ?? Math.max(1, Math.min(1024, Math.floor(context * 0.75)));
export const outputOf = ({ output, context }) => output ?? Math.max(1, Math.min(256, Math.floor(context * 0.25)));

/** The body of POST /plan. */
export function toBody(choices, model) {
  const given = Object.entries(choices).filter(([, value]) => value !== "" && value !== null);
  const body = { ...Object.fromEntries(given), prompt: promptOf(choices), output: outputOf(choices) };
  if (model) body.model = model;
  if (!choices.shape) delete body.format; // its files say how it is stored
  return body;
}
