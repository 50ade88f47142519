/**
 * One conversation with the server over as many sockets as it takes. Knows nothing of sandboxes: whoever uses it says whether a
 * lost socket is to be replaced, and by what address.
 */

import { Emitter } from './emitter.js';
import { openSocket, type Socket } from './socket.js';
import type { ConnectOptions, ServerMessage } from './types.js';

interface Events {
  open: [];
  /** A socket in the place of a lost one. */
  reopen: [];
  message: [ServerMessage];
  lost: [];
  close: [code: number, reason: string];
  error: [unknown];
}

export class Connection extends Emitter<Events> {
  #socket: Socket | null = null;
  #closed = false;
  #attempts = 0;
  #lostAt = 0;
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly options: ConnectOptions,
    private readonly again: (code: number, reason: string) => string | null,
  ) {
    super();
  }

  get isOpen(): boolean {
    return this.#socket !== null;
  }

  async connect(url: string): Promise<void> {
    const socket = await openSocket(url, this.options.wsOptions);
    let opened = false;
    socket.onopen = () => {
      opened = true;
      if (this.#closed) return socket.close();
      this.#socket = socket;
      this.emit(this.#lostAt ? 'reopen' : 'open');
    };
    socket.onmessage = ({ data }) => {
      const message = JSON.parse(String(data)) as ServerMessage;
      this.#debug('<', message);
      this.emit('message', message);
    };
    socket.onerror = (error) => {
      if (!opened && !this.#lostAt) this.emit('error', error);
    };
    socket.onclose = ({ code, reason }) => {
      this.#debug('closed', code);
      this.#socket = null;
      this.#gone(code, String(reason));
    };
  }

  /** The server has taken this socket for good: the next loss is a new one. */
  settle(): void {
    this.#attempts = 0;
    this.#lostAt = 0;
  }

  send(message: object): void {
    if (!this.#socket) throw new Error('the connection is not open');
    this.#debug('>', message);
    this.#socket.send(JSON.stringify(message));
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#socket?.close(1000);
  }

  #gone(code: number, reason: string): void {
    const url = this.#closed ? null : this.again(code, reason);
    const { giveUpAfter = 60_000 } = this.options.backoff ?? {};
    const now = Date.now();
    if (url === null || (this.#lostAt && now - this.#lostAt > giveUpAfter)) {
      this.#closed = true;
      this.emit('close', code, reason);
      return;
    }
    this.#lostAt ||= now;
    this.emit('lost');
    this.#timer = setTimeout(() => {
      if (!this.#closed) this.connect(url).catch((error: unknown) => this.#gone(1006, String(error)));
    }, this.pause(this.#attempts++));
  }

  /** Doubling up to a cap, and anywhere in the upper half of that: many clients do not come back at one instant. */
  pause(attempt: number): number {
    const { first = 100, most = 5_000 } = this.options.backoff ?? {};
    const full = Math.min(most, first * 2 ** Math.min(attempt, 30));
    return full / 2 + (Math.random() * full) / 2;
  }

  #debug(...words: unknown[]): void {
    if (!this.options.enableDebug) return;
    const shown = words.map((one) => (typeof one === 'object' ? redacted(one) : one));
    console.debug(`[sandkeep ${this.options.debugLabel ?? ''}]`, ...shown);
  }
}

function redacted(message: unknown): string {
  return JSON.stringify(message, (name, value: unknown) => (name === 'sandbox_token' ? '…' : value));
}
