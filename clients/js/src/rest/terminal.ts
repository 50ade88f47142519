/** A real terminal inside, over a WebSocket. */

import { Emitter } from '../emitter.js';
import { address, openSocket, type Socket } from '../socket.js';
import { type Http, SandkeepError } from './http.js';

export interface TerminalOptions {
  cols?: number;
  rows?: number;
  command?: string;
  /** Come back to one that runs. */
  pid?: number;
}

interface Events {
  data: [Uint8Array];
  exit: [exitCode: number | null];
  error: [SandkeepError];
  close: [];
}

export class Terminal extends Emitter<Events> {
  pid = 0;
  /** Its exit code; null if we left, or it was lost, before it ended. */
  readonly exited: Promise<number | null>;
  #exit!: (code: number | null) => void;
  #early: Uint8Array[] | null = [];

  private constructor(private readonly socket: Socket) {
    super();
    this.exited = new Promise((resolve) => (this.#exit = resolve));
  }

  static async open(http: Http, id: string, options: TerminalOptions = {}): Promise<Terminal> {
    const query = { ...options, api_key: http.options.apiKey };
    const socket = await openSocket(address(http.url, `/sandboxes/${id}/terminal`, query), http.options.wsOptions);
    const terminal = new Terminal(socket);
    await terminal.#begin();
    return terminal;
  }

  /** What the terminal shows before anybody listens waits for the first listener. */
  override on<E extends keyof Events>(event: E, listener: (...args: Events[E]) => void): () => void {
    const off = super.on(event, listener);
    if (event === 'data' && this.#early) {
      const early = this.#early;
      this.#early = null;
      for (const data of early) this.emit('data', data);
    }
    return off;
  }

  send(data: string | Uint8Array): void {
    this.socket.send(typeof data === 'string' ? new TextEncoder().encode(data) : data);
  }

  resize(cols: number, rows: number): void {
    this.socket.send(JSON.stringify({ type: 'resize', cols, rows }));
  }

  signal(signal: number | string): void {
    this.socket.send(JSON.stringify({ type: 'signal', signal }));
  }

  /** Leave; the terminal goes on, `pid` comes back to it. */
  close(): void {
    this.socket.close(1000);
  }

  #show(data: Uint8Array): void {
    if (this.#early) this.#early.push(data);
    else this.emit('data', data);
  }

  #begin(): Promise<void> {
    return new Promise((resolve, reject) => {
      this.socket.onmessage = ({ data }) => {
        if (typeof data !== 'string') return this.#show(new Uint8Array(data as ArrayBuffer));
        const told = JSON.parse(data) as { type?: string; pid?: number; exit_code?: number; error?: Record<string, unknown> };
        if (told.type === 'start') {
          this.pid = told.pid ?? 0;
          resolve();
        } else if (told.type === 'exit') {
          this.#exit(told.exit_code ?? null);
          this.emit('exit', told.exit_code ?? null);
        } else if (told.error) {
          reject(SandkeepError.of(told.error));
          this.emit('error', SandkeepError.of(told.error));
        }
      };
      this.socket.onerror = () => undefined;
      this.socket.onclose = ({ code }) => {
        reject(new SandkeepError('SERVER_UNREACHABLE', `the terminal was closed (${code})`, 'is the sandbox there, and the key valid?'));
        this.#exit(null);
        this.emit('close');
      };
    });
  }
}
