// Conversations, kept in this browser: an index in the order of use, and one entry for each conversation.

const INDEX = "quire.chats";
const entry = (id) => `quire.chat.${id}`;

/** {id, title, named, created, updated, model, system, params, messages}
 *  message: {role, content, reasoning?, stats?, finish?, error?} */
export class Store {
  constructor(storage, now = Date.now) {
    this.storage = storage;
    this.now = now;
  }

  /** [{id, title, updated}], the last used first. */
  list() {
    return this.#read(INDEX) ?? [];
  }

  create(from = {}) {
    const time = this.now();
    const id = time.toString(36) + Math.random().toString(36).slice(2, 8);
    return { title: "", named: false, system: "", params: {}, messages: [], ...from, id, created: time, updated: time };
  }

  load(id) {
    return this.#read(entry(id));
  }

  /** Throws if the browser has no room left. */
  save(chat) {
    chat.updated = this.now();
    if (!chat.named) chat.title = titleOf(chat);
    this.storage.setItem(entry(chat.id), JSON.stringify(chat));
    const others = this.list().filter((item) => item.id !== chat.id);
    this.#write([{ id: chat.id, title: chat.title, updated: chat.updated }, ...others]);
  }

  rename(id, title) {
    const chat = this.load(id);
    Object.assign(chat, { title: title.trim() || titleOf(chat), named: Boolean(title.trim()) });
    this.storage.setItem(entry(id), JSON.stringify(chat));
    this.#write(this.list().map((item) => (item.id === id ? { ...item, title: chat.title } : item)));
  }

  delete(id) {
    this.storage.removeItem(entry(id));
    this.#write(this.list().filter((item) => item.id !== id));
  }

  #write(list) {
    this.storage.setItem(INDEX, JSON.stringify(list));
  }

  #read(key) {
    const text = this.storage.getItem(key);
    return text === null ? null : JSON.parse(text);
  }
}

const TITLE = 60;

export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content ?? "";
  const line = first.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length <= TITLE ? line : `${line.slice(0, TITLE).replace(/\s+\S*$/, "")}…`;
}

/** A conversation as a document that people read. */
export function asMarkdown(chat) {
  const parts = [`# ${chat.title || "Conversation"}`];
  if (chat.system) parts.push(`> ${chat.system.split("\n").join("\n> ")}`);
  for (const message of chat.messages) {
    parts.push(`**${message.role === "user" ? "You" : chat.model || "Model"}**`, message.content);
  }
  return `${parts.join("\n\n")}\n`;
}
