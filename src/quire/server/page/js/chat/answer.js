// One answer while it comes: its text, its reasoning, and how fast it was.

export class Answer {
  finish = null;
  id = null;
  #usage = null;
  #pieces = 0;
  #first = null;
  #last = null;

  /** It goes on from what `begun` has already. */
  constructor(begun = {}, clock = () => performance.now()) {
    this.content = begun.content ?? "";
    this.reasoning = begun.reasoning ?? "";
    this.clock = clock;
    this.started = clock();
  }

  /** A chunk of the OpenAI kind. */
  add(chunk) {
    this.id ??= chunk.id;
    if (chunk.usage) this.#usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    const content = choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    if (content || reasoning) {
      this.#pieces += 1;
      this.#last = this.clock();
      this.#first ??= this.#last;
    }
    this.content += content;
    this.reasoning += reasoning;
    this.finish = choice.finish_reason ?? this.finish;
  }

  /** Milliseconds and tokens; until the server has counted, each piece passes for a token. */
  get stats() {
    const tokens = this.#usage?.completion_tokens ?? this.#pieces;
    const milliseconds = this.#last - this.#first;
    return {
      tokens,
      ttft: this.#first === null ? null : this.#first - this.started,
      rate: tokens > 1 && milliseconds > 0 ? ((tokens - 1) / milliseconds) * 1000 : null,
      prompt: this.#usage?.prompt_tokens ?? null,
      cached: this.#usage?.prompt_tokens_details?.cached_tokens ?? null,
      drafts: this.#usage?.completion_tokens_details ?? null,
    };
  }
}

export function describeStats(stats, finish) {
  const parts = [`${stats.tokens} ${stats.tokens === 1 ? "token" : "tokens"}`];
  if (stats.ttft !== null) parts.push(`first after ${duration(stats.ttft)}`);
  if (stats.rate !== null) parts.push(`${stats.rate < 10 ? stats.rate.toFixed(1) : Math.round(stats.rate)} tokens/s`);
  if (stats.prompt !== null) {
    parts.push(`prompt ${stats.prompt}${stats.cached ? `, ${stats.cached} of it cached` : ""}`);
  }
  if (stats.drafts) {
    const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } = stats.drafts;
    parts.push(`${accepted} of ${accepted + rejected} draft tokens accepted`);
  }
  if (finish === "length") parts.push("ended at the token limit");
  if (finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

const duration = (milliseconds) =>
  milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
