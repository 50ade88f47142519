/** One execution: its output as streams that can be read at any time, its end, its input. */

import { SandboxError } from './types.js';

const bytes = new TextEncoder();

/** Text as it comes: iterate it, listen to it, or read it all. */
export class OutputStream implements AsyncIterable<string> {
  /** UTF-8 bytes that have arrived. */
  received = 0;
  #pieces: string[] = [];
  #ended = false;
  #failure: Error | null = null;
  readonly #waiting = new Set<() => void>();
  readonly #listeners = new Set<(text: string) => void>();

  /** Every piece: those that are here already, then each as it comes. */
  onData(listener: (text: string) => void): () => void {
    for (const piece of this.#pieces) listener(piece);
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /** All of the output, from its beginning to its end. */
  async readAll(): Promise<string> {
    let all = '';
    for await (const piece of this) all += piece;
    return all;
  }

  async *[Symbol.asyncIterator](): AsyncIterator<string> {
    for (let at = 0; ; at++) {
      while (at >= this.#pieces.length) {
        if (this.#failure) throw this.#failure;
        if (this.#ended) return;
        await new Promise<void>((resolve) => this.#waiting.add(resolve));
      }
      yield this.#pieces[at]!;
    }
  }

  /** @internal */
  push(text: string): void {
    this.received += bytes.encode(text).length;
    this.#pieces.push(text);
    for (const listener of this.#listeners) listener(text);
    this.#wake();
  }

  /** @internal */
  end(failure: Error | null): void {
    this.#ended = true;
    this.#failure = failure;
    this.#wake();
  }

  #wake(): void {
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const go of waiting) go();
  }
}

export class SandboxProcess {
  readonly stdout = new OutputStream();
  readonly stderr = new OutputStream();
  #done = false;
  readonly #end: Promise<void>;
  #resolve!: () => void;
  #reject!: (error: Error) => void;

  /** @internal */
  constructor(
    private readonly send: (message: object) => void,
    private readonly fallback = 5_000,
  ) {
    this.#end = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    this.#end.catch(() => undefined);
  }

  get done(): boolean {
    return this.#done;
  }

  /** Until it has ended and all of its output is here; rejects if its sandbox went away under it. */
  wait(): Promise<void> {
    return this.#end;
  }

  writeToStdin(data: string): void {
    if (this.#done) throw new Error('the process has ended');
    this.send({ event: 'stdin', data });
  }

  /** SIGKILL for it and all that it started; resolves at its end, or after five seconds. */
  async kill(): Promise<void> {
    if (this.#done) return;
    this.send({ action: 'kill_process' });
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<void>((resolve) => (timer = setTimeout(resolve, this.fallback)));
    await Promise.race([this.#end.catch(() => undefined), late]);
    clearTimeout(timer);
  }

  /** Take no more of its output; it goes on. */
  close(): void {
    this.finish(null);
  }

  /** @internal */
  output(stream: 'stdout' | 'stderr', data: string): void {
    if (!this.#done) this[stream].push(data);
  }

  /** @internal */
  finish(failure: SandboxError | null): void {
    if (this.#done) return;
    this.#done = true;
    this.stdout.end(failure);
    this.stderr.end(failure);
    if (failure) this.#reject(failure);
    else this.#resolve();
  }
}
