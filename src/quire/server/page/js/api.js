// The server, as this page asks it. Addresses are relative: a proxy may have mounted it anywhere.

import { eventsOf } from "./sse.js";

const KEY = "quire.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const savedKey = () => localStorage.getItem(KEY) ?? "";
export const saveKey = (key) => (key ? localStorage.setItem(KEY, key) : localStorage.removeItem(KEY));

let askForKey = async () => false;

/** `ask` shows a dialog and resolves to whether a key was given. */
export const onKeyWanted = (ask) => (askForKey = ask);

/** The response, or an ApiError with the server's own words. A 401 asks for a key, and then once more. */
export async function call(path, options = {}) {
  for (;;) {
    const key = savedKey();
    const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const problem = new ApiError(response.status, await reasonOf(response));
    if (response.status !== 401 || !(await askForKey(problem.message))) throw problem;
  }
}

async function reasonOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.trim().slice(0, 300) || `${response.status} ${response.statusText}`;
  }
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
  for await (const chunk of eventsOf(response)) {
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
}

/** What the engine does, until `signal` says that nobody looks any more. */
export async function* streamLive(model, signal) {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  yield* eventsOf(await call(`live${query}`, { signal }));
}
