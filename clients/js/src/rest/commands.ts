/** Commands in a sandbox's shell session, with their exit codes; and the processes they are. */

import { events, type Http, SandkeepError } from './http.js';
import type { CommandResult, ProcessInfo } from './nouns.js';

export interface RunOptions {
  cwd?: string;
  env?: Record<string, string>;
  user?: string;
  stdin?: string;
  /** Seconds. */
  timeout?: number;
  tag?: string;
  /** Bytes of each stream in the answer. */
  max_output?: number;
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
  /** Stops waiting; the command goes on. */
  signal?: AbortSignal;
}

export class Commands {
  constructor(
    private readonly http: Http,
    private readonly path: string,
  ) {}

  /** Run a command line to its end. A failing command is a result, not an error. */
  async run(command: string, options: RunOptions = {}): Promise<CommandResult> {
    const { onStdout, onStderr, signal, ...fields } = options;
    const body = { command, ...fields };
    const init = { body: JSON.stringify(body), headers: { 'content-type': 'application/json' }, ...(signal && { signal }) };
    if (!onStdout && !onStderr) return (await (await this.http.raw('POST', this.path, init)).json()) as CommandResult;
    const { max_output: _, ...streamed } = body;
    const answer = await this.http.raw('POST', this.path, { ...init, body: JSON.stringify(streamed) }, { stream: 'sse' });
    return collect(answer, onStdout, onStderr);
  }

  /** Start a command in the background. */
  async start(command: string, options: Omit<RunOptions, 'stdin' | 'onStdout' | 'onStderr' | 'signal' | 'max_output'> = {}): Promise<Process> {
    const { pid } = await this.http.json<{ pid: number }>('POST', this.path, { command, background: true, ...options });
    return new Process(this.http, this.path, pid);
  }

  async list(): Promise<ProcessInfo[]> {
    return (await this.http.json<{ commands: ProcessInfo[] }>('GET', this.path)).commands;
  }

  connect(pid: number): Process {
    return new Process(this.http, this.path, pid);
  }
}

export class Process {
  readonly #path: string;

  constructor(
    private readonly http: Http,
    path: string,
    readonly pid: number,
  ) {
    this.#path = `${path}/${pid}`;
  }

  info(): Promise<ProcessInfo> {
    return this.http.json('GET', this.#path);
  }

  /** Its outcome, with the output that is still kept. */
  wait(): Promise<CommandResult> {
    return this.http.json('GET', `${this.#path}/wait`);
  }

  /** Its output from the start of what is kept, then live; the end of the loop is its end. */
  async *output(): AsyncGenerator<{ stream: 'stdout' | 'stderr'; text: string }> {
    for await (const [name, data] of events(await this.http.raw('GET', `${this.#path}/output`))) {
      if (name === 'stdout' || name === 'stderr') yield { stream: name, text: String(data['text']) };
      else if (name === 'error') throw SandkeepError.of(data);
    }
  }

  async writeToStdin(data: string | Uint8Array<ArrayBuffer>, options: { close?: boolean } = {}): Promise<void> {
    await this.http.raw('POST', `${this.#path}/stdin`, { body: data }, { close: options.close });
  }

  async closeStdin(): Promise<void> {
    await this.http.raw('POST', `${this.#path}/stdin`, {}, { close: true });
  }

  /** Signal it and all that it started. */
  async kill(signal: number | string = 9): Promise<void> {
    await this.http.json('POST', `${this.#path}/signal`, { signal });
  }
}

async function collect(answer: Response, onStdout?: (text: string) => void, onStderr?: (text: string) => void): Promise<CommandResult> {
  const text = { stdout: '', stderr: '' };
  for await (const [name, data] of events(answer)) {
    if (name === 'stdout' || name === 'stderr') {
      const piece = String(data['text']);
      text[name] += piece;
      (name === 'stdout' ? onStdout : onStderr)?.(piece);
    } else if (name === 'exit') {
      return { ...text, ...(data as unknown as Omit<CommandResult, 'stdout' | 'stderr'>), truncated: Boolean(data['truncated']) };
    } else if (name === 'error') {
      throw SandkeepError.of(data);
    }
  }
  throw new SandkeepError('SERVER_UNREACHABLE', 'the answer ended before the command did', 'look for the command in the list');
}
