// The conversation that is open, and the answers that are being written, also in others.

import { h, announce } from "../dom.js";
import { streamChat } from "../api.js";
import { askForKey } from "../keydialog.js";
import { asMarkdown } from "../store.js";
import { Prose } from "../prose.js";
import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { MessageView } from "./message.js";
import { requestFor } from "./parameters.js";
import { Settings } from "./settings.js";
import { setAside, turn } from "./versions.js";

const SUGGESTIONS = [
  "What is the capital of France, and what is it known for?",
  "Write a Python function that adds up the numbers in a list.",
  "What is photosynthesis?",
];
const NEAR = 80; // pixels from the end within which the page follows the text

export class ChatView {
  /** `model()` is the name that is asked; `onchange()` is called when titles or states have changed. */
  constructor(element, { store, model, onchange }) {
    Object.assign(this, { store, model, onchange });
    this.writing = new Map(); // id of a conversation -> {chat, message, controller, answer}
    this.ours = new Set(); // ends of the ids of our requests, to find them again in the engine's view
    this.leaf = h(".leaf");
    this.transcript = h(".transcript", { role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: "0", onscroll: () => this.#scrolled() }, this.leaf);
    this.toEnd = h("button.to-end", { type: "button", hidden: true, onclick: () => this.#follow(true) }, "To the end");
    this.composer = new Composer({
      onsend: (text) => this.send(text),
      onstop: () => this.stop(),
      onedit: () => this.editLast(),
      onsettings: () => this.toggleSettings(),
    });
    this.settings = new Settings({
      onchange: () => this.chat.messages.length && this.#save(this.chat),
      onclose: () => this.toggleSettings(),
      actions: [
        { label: "Export as Markdown", run: () => this.#export("md", "text/markdown", asMarkdown(this.chat)) },
        { label: "Export as JSON", run: () => this.#export("json", "application/json", JSON.stringify(this.chat, null, 2)) },
        { label: "API key…", run: () => askForKey() },
      ],
    });
    element.append(h(".conversation", this.transcript, this.toEnd, this.composer.element), this.settings.element);
    this.open(null);
    new ResizeObserver(() => this.#follow()).observe(this.transcript); // a notice or a keyboard takes room
    addEventListener("pagehide", () => this.writing.forEach(({ chat }) => this.#save(chat)));
  }

  /** A conversation by its id; null is a new one, which is kept once something was said in it. */
  open(id) {
    const before = this.chat;
    this.chat = this.writing.get(id)?.chat ?? (id && this.store.load(id)) ?? this.store.create({
      system: before?.system ?? "",
      params: { ...before?.params },
    });
    this.settings.show(this.chat);
    this.#render();
    this.#follow(true);
    return this.chat;
  }

  send(text) {
    this.chat.messages.push({ role: "user", content: text });
    this.#answer();
  }

  /** Ask in other words what was asked at `index`. */
  #askAgain(index, text) {
    this.stop();
    const versions = setAside(this.chat.messages, index);
    this.chat.messages.push({ role: "user", content: text, versions });
    this.#answer();
    if (matchMedia("(hover: hover)").matches) this.composer.input.focus(); // elsewhere a keyboard would come up
  }

  #answerAgain(index) {
    this.stop();
    const { messages } = this.chat;
    this.#answer({ role: "assistant", content: "", versions: index < messages.length ? setAside(messages, index) : undefined });
  }

  /** To the version before (-1) or after (1) what begins at `index`. */
  #turn(index, step) {
    this.stop();
    if (!turn(this.chat.messages, index, step)) return;
    this.#save(this.chat);
    this.#render();
    this.views[index].element.scrollIntoView({ block: "nearest" });
  }

  retry() {
    const index = this.chat.messages.findLastIndex((message) => message.role === "user");
    if (index >= 0) this.#answerAgain(index + 1);
  }

  /** Whether there is anything to edit. */
  editLast() {
    const last = this.views.findLast((view) => view.mine);
    last?.edit();
    return Boolean(last);
  }

  stop() {
    this.writing.get(this.chat.id)?.controller.abort();
  }

  /** Into `message`; one that has a text already, the last one, is gone on with. */
  async #answer(message = { role: "assistant", content: "" }) {
    const chat = this.chat;
    chat.model = this.model();
    const body = requestFor(chat, chat.model || undefined);
    if (message.content) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    else chat.messages.push(message);
    delete message.error;
    const controller = new AbortController();
    const answer = new Answer(message);
    const run = { chat, message, controller, answer };
    this.writing.set(chat.id, run);
    this.#save(chat);
    this.#render();
    this.#follow(true);
    try {
      for await (const chunk of streamChat(body, controller.signal)) {
        answer.add(chunk);
        if (answer.id) this.ours.add(answer.id.slice(-8));
        this.#draw(run);
      }
    } catch (error) {
      if (controller.signal.aborted) answer.finish = "stopped";
      else message.error = error.message;
    }
    this.#take(run);
    if (this.writing.get(chat.id) === run) this.writing.delete(chat.id);
    if (chat.messages.includes(message)) this.#save(chat); // not if it was asked again meanwhile
    if (this.chat === chat) {
      this.#viewOf(message)?.update(false);
      this.composer.setBusy(this.writing.has(chat.id));
      this.#follow();
      announce(message.error ? `Failed: ${message.error}` : "The answer is complete");
    }
    this.onchange();
  }

  #take({ message, answer }) {
    Object.assign(message, { content: answer.content, stats: answer.stats, finish: answer.finish });
    if (answer.reasoning) message.reasoning = answer.reasoning;
  }

  /** At most once for each frame the browser shows. */
  #draw(run) {
    if (run.drawing) return;
    run.drawing = requestAnimationFrame(() => {
      run.drawing = null;
      if (this.writing.get(run.chat.id) !== run) return;
      this.#take(run);
      this.#viewOf(run.message)?.update(true);
      this.#follow();
    });
  }

  #viewOf(message) {
    return this.views.find((view) => view.message === message);
  }

  #render() {
    const { messages, id } = this.chat;
    const run = this.writing.get(id);
    this.views = messages.map(
      (message, index) =>
        new MessageView(message, this.chat.model || "Model", {
          edit: (text) => this.#askAgain(index, text),
          retry: () => this.#answerAgain(index),
          goOn: index === messages.length - 1 ? () => this.#answer(message) : null,
          turn: (step) => this.#turn(index, step),
        }),
    );
    if (run) this.#viewOf(run.message)?.update(true);
    this.leaf.replaceChildren(...(messages.length ? this.views.map((view) => view.element) : [this.#welcome()]));
    this.composer.setBusy(Boolean(run));
  }

  #welcome() {
    const address = new URL("v1", location.href.split("#")[0]).href;
    const example = new Prose();
    example.set(`\`\`\`python\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${address}", api_key="none")\n\`\`\``);
    return h(
      ".welcome",
      h("h2", "A quire is a gathering of pages."),
      h("p", "This one gathers the pages of a model’s memory, and talks. What you write stays between this browser and the server that sent you this page."),
      h("ul.suggestions", SUGGESTIONS.map((text) => h("li", h("button", { type: "button", onclick: () => this.composer.set(text) }, text)))),
      h(
        "details.programs",
        h("summary", "Use it from your own programs"),
        h("p", "Clients of OpenAI, Anthropic, Ollama, Text Generation Inference and KServe find here what they look for."),
        example.element,
      ),
    );
  }

  #save(chat) {
    try {
      this.store.save(chat);
    } catch {
      announce("The browser has no room left: delete some conversations");
    }
    this.onchange();
  }

  toggleSettings() {
    const panel = this.settings.element;
    panel.hidden = !panel.hidden;
    this.composer.settings.setAttribute("aria-expanded", String(!panel.hidden));
    (panel.hidden ? this.composer.settings : this.settings.system).focus();
  }

  /** Whether it was open, and either lies over the page or is where people are. */
  closeSettings() {
    const panel = this.settings.element;
    const over = getComputedStyle(panel).position === "fixed";
    if (panel.hidden || !(over || panel.contains(document.activeElement))) return false;
    this.toggleSettings();
    return true;
  }

  #export(ending, type, text) {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const name = (this.chat.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50);
    h("a", { href: address, download: `${name}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  // ---- the page follows the text, unless the user has scrolled away from its end

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.transcript;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR;
    this.toEnd.hidden = this.following;
  }

  #follow(always = false) {
    if (always || this.following) this.transcript.scrollTop = this.transcript.scrollHeight;
    this.#scrolled();
  }
}
