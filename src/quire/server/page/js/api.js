// The server, as this page asks it. Addresses are relative: a proxy may have mounted it anywhere.

import { eventsOf } from "./sse.js";
import { kept, untilClosed } from "./storage.js";

const KEY = "quire.key";

export class ApiError extends Error {
  /** `param`: the field that is wrong, where the server names one. */
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export const savedKey = () => untilClosed.getItem(KEY) ?? kept.getItem(KEY) ?? "";
export const keyIsKept = () => kept.getItem(KEY) !== null;

/** In this browser, or until the tab is closed; "" forgets it. */
export function saveKey(key, keep) {
  for (const storage of [kept, untilClosed]) storage.removeItem(KEY);
  if (key) (keep ? kept : untilClosed).setItem(KEY, key);
}

let askForKey = async () => false;

/** `ask` shows a dialog and resolves to whether a key was given. */
export const onKeyWanted = (ask) => (askForKey = ask);

/** The response, or an ApiError with the server's own words. A 401 asks for a key, and then once more. */
export async function call(path, options = {}) {
  for (;;) {
    const key = savedKey();
    const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
    const response = await reached(fetch(path, { ...options, headers }), "The server does not answer.");
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401 || !(await askForKey(problem.message))) throw problem;
  }
}

/** A browser's own words for a network that fails say nothing to anybody. */
async function reached(promise, words) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new ApiError(0, words) : error;
  }
}

async function* eventsFrom(response) {
  const events = eventsOf(response);
  try {
    for (;;) {
      const { done, value } = await reached(events.next(), "The connection to the server broke off.");
      if (done) return;
      yield value;
    }
  } finally {
    events.return();
  }
}

async function problemOf(response) {
  const text = await response.text();
  let reason, param;
  try {
    ({ message: reason, param } = JSON.parse(text).error);
  } catch {
    reason = text.trim().slice(0, 300) || `${response.status} ${response.statusText}`;
  }
  if (response.status === 401) reason = `The server asks for a key: ${reason.replace(/ \(.*\)$/, "")}.`; // what is in brackets is for programs
  return new ApiError(response.status, reason, param);
}

export async function listModels() {
  return (await (await call("v1/models")).json()).data;
}

/** The chunks of a chat completion. */
export async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const chunk of eventsFrom(response)) {
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
}

/** The events of the engine, until `signal` aborts. */
export async function* streamLive(model, signal) {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  yield* eventsFrom(await call(`live${query}`, { signal }));
}

/** What `quire plan` says of `choices`, beside what the server has. */
export async function makePlan(choices) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(choices) };
  return (await call("plan", options)).json();
}
