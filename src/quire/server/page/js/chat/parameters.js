// What can be asked of the sampler. What is left empty is not sent: the model's advice is the default.

export const PARAMETERS = [
  { name: "temperature", label: "Temperature", hint: "0: always the likeliest", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top p", hint: "share of probability kept", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", hint: "tokens kept", min: 1, step: 1, whole: true },
  { name: "min_p", label: "Min p", hint: "beside the likeliest", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1 is none", min: 0.1, max: 2, step: 0.05 },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "0 is none", min: -2, max: 2, step: 0.1 },
  { name: "max_tokens", label: "Max tokens", hint: "of one answer", min: 1, step: 1, whole: true },
  { name: "seed", label: "Seed", hint: "repeats an answer", step: 1, whole: true },
];

/** A number that may be sent, undefined for an empty field, NaN for anything else. */
export function readNumber(text, { min = -Infinity, max = Infinity, whole = false }) {
  if (text.trim() === "") return undefined;
  const value = Number(text);
  return value >= min && value <= max && (!whole || Number.isSafeInteger(value)) ? value : NaN;
}

/** The body of a request for the next answer in `chat`. */
export function requestFor(chat, model) {
  const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  const messages = chat.messages.map(({ role, content }) => ({ role, content }));
  const { stop, ...numbers } = chat.params;
  return { model, messages: [...system, ...messages], ...numbers, ...(stop?.length && { stop }) };
}
