// Server-sent events from a fetch: unlike EventSource it can send a key, a body, and be aborted.

/** The `data` of each event in a text that comes in pieces. */
export class EventParser {
  #rest = "";

  push(text) {
    const events = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = events.pop();
    return events
      .map((event) =>
        event
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(line[5] === " " ? 6 : 5))
          .join("\n"),
      )
      .filter((data) => data !== "");
  }
}

/** Yields the parsed JSON of each event of a response, until it ends or says [DONE]. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      for (const data of parser.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
