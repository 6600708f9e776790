// What has been seen of the engine, event by event: its last steps, and the life of each request.
//
// A request's life is a list of spans {kind, from, to} on the server's clock; `to` is null for the current one.
//   unseen     before anybody looked
//   queued     waits for its first step
//   prefill    one chunk of its prompt is computed ({start, count})
//   decode     tokens are sampled, one in each step
//   preempted  gave its blocks to another, and waits again

const MAX_STEPS = 240;
const MAX_REQUESTS = 60;
const RATE_WINDOW = 5; // seconds
const RATES_KEPT = 90;

export class History {
  requests = new Map(); // by id, in the order in which they were first seen
  steps = [];
  snapshot = null; // the last one
  rates = []; // {now, generation, prefill}: tokens a second
  #totals = []; // {now, generation}
  #number = 0;

  add(event) {
    const { engine } = event;
    const known = new Map();
    for (const record of event.finished) known.set(record.id, { arrival: record.arrival, prompt: record.num_prompt_tokens });
    for (const view of engine?.sequences ?? []) known.set(view.request_id, { arrival: view.arrival, prompt: view.num_prompt });
    for (const step of engine?.steps ?? []) this.#step(step, known);
    if (engine) {
      this.snapshot = engine;
      this.#sequences(engine);
    }
    for (const record of event.finished) this.#finish(record, event.now);
    this.now = event.now;
    this.#measure(event);
    this.#forget();
  }

  #request(id, arrival) {
    let request = this.requests.get(id);
    if (!request) {
      request = { id, number: this.#number++, arrival, spans: [], state: "waiting", prompt: 0, cached: 0, output: 0, blocks: 0, record: null };
      this.requests.set(id, request);
    }
    return request;
  }

  #step(step, known) {
    this.steps.push(step);
    const began = step.ended - step.seconds;
    for (const id of step.preempted) {
      const request = this.requests.get(id);
      if (request && !request.record && request.spans.at(-1)?.kind !== "preempted") open(request, "preempted", began);
    }
    for (const chunk of step.chunks) {
      const { arrival = began, prompt = Infinity } = known.get(chunk.request_id) ?? this.requests.get(chunk.request_id) ?? {};
      const request = this.#request(chunk.request_id, arrival);
      if (!request.spans.length) open(request, "queued", arrival);
      close(request, began);
      request.spans.push({ kind: "prefill", from: began, to: step.ended, start: chunk.start, count: chunk.count });
      if (chunk.start + chunk.count >= prompt) open(request, "decode", step.ended);
    }
  }

  #sequences({ sequences, now }) {
    const seen = new Set();
    for (const view of sequences) {
      const request = this.#request(view.request_id, view.arrival);
      const first = !seen.has(request.id);
      seen.add(request.id);
      const drawn = Math.max(view.num_known - view.num_prompt, 0);
      request.output = first ? drawn : request.output + drawn; // samples of one request add up
      request.blocks = first ? view.num_blocks : request.blocks + view.num_blocks;
      Object.assign(request, { prompt: view.num_prompt, cached: view.num_cached, state: view.state });
      const kind = { waiting: "queued", preempted: "preempted", running: view.num_computed >= view.num_prompt ? "decode" : "" }[view.state];
      if (!request.spans.length) {
        if (view.state === "waiting") open(request, "queued", view.arrival);
        else request.spans.push({ kind: "unseen", from: view.arrival, to: now });
      }
      const last = request.spans.at(-1);
      if (first && kind && last.kind !== kind) open(request, kind, last.to ?? now);
    }
  }

  #finish(record, now) {
    const request = this.#request(record.id, record.arrival);
    if (!request.spans.length) {
      const first = record.first_token ?? record.finished;
      request.spans.push({ kind: "unseen", from: record.arrival, to: first });
      if (first < record.finished) open(request, "decode", first);
    }
    close(request, record.finished);
    Object.assign(request, {
      record,
      state: record.finish_reason,
      prompt: record.num_prompt_tokens,
      cached: record.num_cached_tokens,
      output: record.num_output_tokens,
      blocks: 0,
    });
  }

  #measure({ now, tokens }) {
    this.#totals.push({ now, generation: tokens.generation });
    while (this.#totals.length > 1 && this.#totals[0].now < now - RATE_WINDOW) this.#totals.shift();
    const [{ now: since, generation: before }] = this.#totals;
    const time = now - since;
    let prefill = 0;
    for (let i = this.steps.length - 1; i >= 0 && this.steps[i].ended > now - RATE_WINDOW; i--) {
      for (const chunk of this.steps[i].chunks) prefill += chunk.count;
    }
    this.rates.push({ now, generation: time > 0 ? (tokens.generation - before) / time : 0, prefill: prefill / RATE_WINDOW });
    if (this.rates.length > RATES_KEPT) this.rates.shift();
  }

  #forget() {
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    for (const request of this.requests.values()) {
      if (this.requests.size <= MAX_REQUESTS) return;
      if (request.record) this.requests.delete(request.id);
    }
  }
}

function close(request, at) {
  const last = request.spans.at(-1);
  if (last && last.to === null) last.to = Math.max(at, last.from);
}

function open(request, kind, at) {
  close(request, at);
  request.spans.push({ kind, from: at, to: null });
}

/** Its life in words: for screen readers, and for the exact numbers. */
export function describe(request, now, inSeconds) {
  const parts = [];
  const time = (kind) =>
    request.spans.filter((span) => span.kind === kind).reduce((sum, span) => sum + (span.to ?? now) - span.from, 0);
  const chunks = request.spans.filter((span) => span.kind === "prefill");
  if (request.spans[0]?.kind === "unseen") parts.push(`${inSeconds(time("unseen"))} before anybody looked`);
  if (request.spans.some((span) => span.kind === "queued")) parts.push(`queued ${inSeconds(time("queued"))}`);
  if (request.cached) parts.push(`${request.cached} prompt tokens found in the cache`);
  if (chunks.length) {
    parts.push(`prefill ${inSeconds(time("prefill"))} in ${chunks.length === 1 ? "one chunk" : `${chunks.length} chunks`} of ${chunks.map((chunk) => chunk.count).join(" + ")} tokens`);
  }
  if (request.spans.some((span) => span.kind === "preempted")) parts.push(`preempted for ${inSeconds(time("preempted"))}`);
  if (request.output) parts.push(`${request.output} tokens sampled in ${inSeconds(time("decode"))}`);
  const drafts = request.record?.drafts;
  if (drafts?.num_tokens) {
    const accepted = drafts.lengths.reduce((sum, count, length) => sum + count * length, 0);
    parts.push(`${accepted} of ${drafts.num_tokens} draft tokens accepted`);
  }
  if (request.record) parts.push(`ended by ${request.record.finish_reason}`);
  return parts.join(" · ");
}
