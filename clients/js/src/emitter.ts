/** Typed events. A listener that throws is the caller's concern: the others still hear. */

export class Emitter<Events extends Record<keyof Events, unknown[]>> {
  readonly #listeners: { [E in keyof Events]?: Set<(...args: Events[E]) => void> } = {};

  /** Returns what takes the listener away again. */
  on<E extends keyof Events>(event: E, listener: (...args: Events[E]) => void): () => void {
    const all = (this.#listeners[event] ??= new Set());
    all.add(listener);
    return () => void all.delete(listener);
  }

  once<E extends keyof Events>(event: E, listener: (...args: Events[E]) => void): () => void {
    const off = this.on(event, (...args) => {
      off();
      listener(...args);
    });
    return off;
  }

  protected emit<E extends keyof Events>(event: E, ...args: Events[E]): void {
    for (const listener of [...(this.#listeners[event] ?? [])]) {
      try {
        listener(...args);
      } catch (error) {
        queueMicrotask(() => {
          throw error;
        });
      }
    }
  }
}
