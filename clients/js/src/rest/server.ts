/** A server's sandboxes over REST: commands with exit codes, files, save points, sleep and wake. */

import { Commands } from './commands.js';
import { Files } from './files.js';
import { Http, SandkeepError, type ServerOptions } from './http.js';
import type { CheckpointInfo, FileInfo, HistoryEntry, Level, NewSandbox, RestoreReport, SandboxInfo, SnapshotInfo } from './nouns.js';
import { Terminal, type TerminalOptions } from './terminal.js';

export class Sandkeep {
  readonly checkpoints: Checkpoints;
  readonly #http: Http;

  constructor(url: string, options: ServerOptions = {}) {
    this.#http = new Http(url, options);
    this.checkpoints = new Checkpoints(this.#http);
  }

  async create(options: NewSandbox = {}): Promise<RemoteSandbox> {
    return new RemoteSandbox(this.#http, (await this.#http.json<SandboxInfo>('POST', '/sandboxes', options)).id);
  }

  /** A sandbox that is; not looked at, not woken. */
  sandbox(id: string): RemoteSandbox {
    return new RemoteSandbox(this.#http, id);
  }

  /** Newest first, page by page. */
  async *list(query: { project?: string; state?: SandboxInfo['state'] } = {}): AsyncGenerator<SandboxInfo> {
    let cursor: string | undefined;
    do {
      const page: { sandboxes: SandboxInfo[]; cursor: string | null } = await this.#http.json('GET', '/sandboxes', undefined, { ...query, cursor });
      yield* page.sandboxes;
      cursor = page.cursor ?? undefined;
    } while (cursor);
  }
}

export class RemoteSandbox {
  readonly commands: Commands;
  readonly files: Files;
  readonly #path: string;

  constructor(
    private readonly http: Http,
    readonly id: string,
  ) {
    this.#path = `/sandboxes/${encodeURIComponent(id)}`;
    this.commands = new Commands(http, `${this.#path}/commands`);
    this.files = new Files(http, `${this.#path}/files`);
  }

  info(): Promise<SandboxInfo> {
    return this.http.json('GET', this.#path);
  }

  /** It is in use, say; as every other call does by itself. */
  activity(): Promise<SandboxInfo> {
    return this.#post('activity');
  }

  kill(): Promise<void> {
    return this.http.json('DELETE', this.#path);
  }

  pause(): Promise<SandboxInfo> {
    return this.#post('pause');
  }

  /** With `fail_over` also one whose host is gone: from its last checkpoint, without what came after. */
  resume(options: { secrets?: Record<string, string>; fail_over?: boolean } = {}): Promise<SandboxInfo> {
    return this.#post('resume', options);
  }

  /** A new sandbox from this one as it is now. */
  async fork(options: { secrets?: Record<string, string>; memory?: boolean } = {}): Promise<RemoteSandbox> {
    const [one] = await this.forks(1, options);
    if (one instanceof RemoteSandbox) return one;
    throw one ?? new SandkeepError('SANDKEEP_ERROR', 'the server made no fork');
  }

  /** One entry each: a sandbox, or the error that stopped it. */
  async forks(count: number, options: { secrets?: Record<string, string>; memory?: boolean } = {}): Promise<(RemoteSandbox | SandkeepError)[]> {
    const { sandboxes } = await this.#post<{ sandboxes: (SandboxInfo | { error: Record<string, unknown> })[] }>('fork', { count, ...options });
    return sandboxes.map((one) => ('error' in one ? SandkeepError.of(one.error) : new RemoteSandbox(this.http, one.id)));
  }

  snapshot(comment = ''): Promise<SnapshotInfo> {
    return this.#post('snapshot', { comment });
  }

  async snapshots(): Promise<SnapshotInfo[]> {
    return (await this.http.json<{ snapshots: SnapshotInfo[] }>('GET', `${this.#path}/snapshots`)).snapshots;
  }

  /** Be what a snapshot or a checkpoint says. */
  restore(to: string | { id: string }, options: { keep?: boolean; require?: Level } = {}): Promise<RestoreReport> {
    return this.#post('restore', { to: typeof to === 'string' ? to : to.id, ...options });
  }

  checkpoint(options: { comment?: string; tag?: string; metadata?: Record<string, unknown>; scope?: 'all' | 'workspace'; exclude?: string[]; memory?: boolean } = {}): Promise<CheckpointInfo> {
    return this.#post('checkpoints', options);
  }

  async env(): Promise<Record<string, string>> {
    return (await this.http.json<{ env: Record<string, string> }>('GET', `${this.#path}/env`)).env;
  }

  setEnv(variables: Record<string, string>): Promise<void> {
    return this.http.json('PUT', `${this.#path}/env`, variables);
  }

  async history(): Promise<HistoryEntry[]> {
    return (await this.http.json<{ history: HistoryEntry[] }>('GET', `${this.#path}/history`)).history;
  }

  terminal(options: TerminalOptions = {}): Promise<Terminal> {
    return Terminal.open(this.http, this.id, options);
  }

  #post<T>(verb: string, body: object = {}): Promise<T> {
    return this.http.json('POST', `${this.#path}/${verb}`, body);
  }
}

/** The checkpoints of the key's own sandboxes. */
export class Checkpoints {
  constructor(private readonly http: Http) {}

  async list(query: { limit?: number; tag?: string; before?: string; project?: string } = {}): Promise<CheckpointInfo[]> {
    return (await this.http.json<{ checkpoints: CheckpointInfo[] }>('GET', '/checkpoints', undefined, query)).checkpoints;
  }

  get(id: string): Promise<CheckpointInfo> {
    return this.http.json('GET', `/checkpoints/${encodeURIComponent(id)}`);
  }

  async diff(a: string, b: string): Promise<Record<string, unknown>[]> {
    return (await this.http.json<{ changes: Record<string, unknown>[] }>('GET', '/checkpoints/diff', undefined, { a, b })).changes;
  }

  async ls(id: string, path = '/'): Promise<FileInfo[]> {
    return (await this.http.json<{ files: FileInfo[] }>('GET', `/checkpoints/${encodeURIComponent(id)}/ls`, undefined, { path })).files;
  }

  async read(id: string, path: string): Promise<Uint8Array> {
    return new Uint8Array(await (await this.http.raw('GET', `/checkpoints/${encodeURIComponent(id)}/files`, {}, { path })).arrayBuffer());
  }
}
