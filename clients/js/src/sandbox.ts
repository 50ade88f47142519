/**
 * A sandbox over the WebSocket protocol: code in, output out, checkpoint and come back.
 *
 * What the server says moves `state`; `checkpointed`, `closed` and `failed` are final. An error of the protocol is two messages, a status
 * and then its text; it is dealt with when both are here.
 */

import { Connection } from './connection.js';
import { Emitter } from './emitter.js';
import { SandboxProcess } from './process.js';
import { address } from './socket.js';
import { type ConnectOptions, type CreateOptions, type Language, SandboxError, type SandboxEvent, type SandboxState, type ServerMessage, TERMINAL } from './types.js';

export interface SandboxEvents {
  /** Every status, as it comes. */
  status: [SandboxEvent];
  state: [state: SandboxState, before: SandboxState];
  created: [];
  failed: [SandboxError];
  checkpointed: [];
  checkpoint_error: [SandboxError];
  filesystem_snapshot_created: [];
  filesystem_snapshot_error: [SandboxError];
  killed: [];
  /** It is gone from the server: idle too long, or taken away. */
  deleted: [];
  reconnecting: [];
  reconnected: [];
  /** An error that belongs to no call of ours. */
  error: [SandboxError];
}

interface Call {
  resolve(): void;
  reject(error: Error): void;
}
type Waiting = 'begin' | 'exec' | 'checkpoint' | 'snapshot' | 'kill';

/** Errors whose text does not follow in a message of its own. */
const BARE: ReadonlySet<SandboxEvent> = new Set(['SANDBOX_NOT_FOUND', 'SANDBOX_IN_USE', 'SANDBOX_LOCK_RENEWAL_ERROR']);
/** After these the sandbox is not to be attached to again. */
const LAST: ReadonlySet<SandboxEvent> = new Set(['SANDBOX_ERROR', 'SANDBOX_NOT_FOUND', 'SANDBOX_CREATION_ERROR', 'SANDBOX_CHECKPOINT_ERROR', 'SANDBOX_RESTORE_ERROR', 'SANDBOX_DELETED', 'SANDBOX_LOCK_RENEWAL_ERROR', 'SANDBOX_PERMISSION_DENIAL_ERROR']);

export class Sandbox extends Emitter<SandboxEvents> {
  sandboxId: string | null = null;
  sandboxToken: string | null = null;
  #state: SandboxState;
  #armed = false;
  #process: SandboxProcess | null = null;
  #half: SandboxEvent | null = null;
  #unsent: object[] = [];
  readonly #calls = new Map<Waiting, Call>();
  readonly #connection: Connection;

  private constructor(
    private readonly url: string,
    private readonly options: ConnectOptions,
    state: SandboxState,
  ) {
    super();
    this.#state = state;
    this.#connection = new Connection(options, (code, reason) => (this.shouldReconnect(code, reason) ? this.#attachUrl() : null));
    this.#connection.on('message', (message) => this.#hear(message));
    this.#connection.on('close', (code) => this.#over(code));
    this.#connection.on('lost', () => this.#lost());
    this.#connection.on('reopen', () => this.#reopened());
  }

  /** A new sandbox. */
  static async create(url: string, options: CreateOptions = {}): Promise<Sandbox> {
    const sandbox = new Sandbox(url, options, 'creating');
    sandbox.#connection.once('open', () =>
      sandbox.#connection.send({
        idle_timeout: options.idleTimeout,
        enable_checkpoint: options.enableCheckpoint ?? options.enableSandboxCheckpoint ?? false,
        enable_sandbox_handoff: options.enableSandboxHandoff ?? false,
        enable_idle_timeout_auto_checkpoint: options.enableIdleTimeoutAutoCheckpoint ?? false,
        filesystem_snapshot_name: options.filesystemSnapshotName ?? null,
      }),
    );
    return sandbox.#begin(address(url, '/create', { api_key: options.apiKey }));
  }

  /** A sandbox that is: it is restored if it sleeps. */
  static async attach(url: string, sandboxId: string, sandboxToken: string, options: ConnectOptions = {}): Promise<Sandbox> {
    const sandbox = new Sandbox(url, options, 'restoring');
    sandbox.sandboxId = sandboxId;
    sandbox.sandboxToken = sandboxToken;
    return sandbox.#begin(sandbox.#attachUrl());
  }

  get state(): SandboxState {
    return this.#state;
  }

  /** Resolves when the code runs. One execution at a time. */
  async exec(language: Language, code: string): Promise<SandboxProcess> {
    if (this.#process && !this.#process.done) throw new Error('An execution is already in progress.');
    this.#require('running');
    const process = (this.#process = new SandboxProcess((message) => this.#post(message)));
    try {
      await this.#call('exec', { language, code });
    } catch (error) {
      if (this.#process === process) this.#process = null;
      process.finish(error instanceof SandboxError ? error : null);
      throw error;
    }
    return process;
  }

  /** Save everything and let go. This object is finished; `Sandbox.attach` comes back to it, here or elsewhere. */
  async checkpoint(): Promise<void> {
    this.#require('running');
    this.#move('checkpointing');
    await this.#call('checkpoint', { action: 'checkpoint' });
  }

  /** Save the files under a name that `create` can begin from, and go on. */
  async snapshotFilesystem(name: string): Promise<void> {
    this.#require('running');
    this.#move('filesystem_snapshotting');
    await this.#call('snapshot', { action: 'snapshot_filesystem', name });
  }

  /** Destroy it. Resolves when it is gone, or after five seconds without an answer. */
  async kill(): Promise<void> {
    if (this.#state === 'checkpointed' || !this.#connection.isOpen) return this.close();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<void>((resolve) => (timer = setTimeout(resolve, 5_000)));
    this.#armed = false;
    try {
      await Promise.race([this.#call('kill', { action: 'kill_sandbox' }), late]);
    } finally {
      clearTimeout(timer);
      this.close();
    }
  }

  /** Leave it to itself: the sandbox and its execution go on. */
  close(): void {
    this.#armed = false;
    this.#connection.close();
    if (!TERMINAL.has(this.#state)) this.#move('closed');
  }

  shouldReconnect(_code: number, _reason: string): boolean {
    return this.#armed && (this.options.enableAutoReconnect ?? false) && !TERMINAL.has(this.#state);
  }

  // --- the conversation

  async #begin(url: string): Promise<this> {
    const begun = new Promise<void>((resolve, reject) => this.#calls.set('begin', { resolve, reject }));
    this.#connection.on('error', (cause) => this.#settle('begin', new Error(`no connection to ${this.url}`, { cause })));
    await this.#connection.connect(url);
    await begun;
    return this;
  }

  #attachUrl(): string {
    return address(this.url, `/attach/${encodeURIComponent(this.sandboxId ?? '')}`, { sandbox_token: this.sandboxToken ?? '' });
  }

  #require(state: SandboxState): void {
    if (this.#state !== state) throw new Error(`the sandbox is ${this.#state}, not ${state}`);
  }

  #move(state: SandboxState): void {
    const before = this.#state;
    if (before === state || TERMINAL.has(before)) return;
    this.#state = state;
    this.emit('state', state, before);
  }

  #call(name: Waiting, message: object): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#calls.set(name, { resolve, reject });
      this.#connection.send(message);
    });
  }

  #settle(name: Waiting, error?: Error): boolean {
    const call = this.#calls.get(name);
    this.#calls.delete(name);
    if (error) call?.reject(error);
    else call?.resolve();
    return call !== undefined;
  }

  /** Now, or when the socket is back. */
  #post(message: object): void {
    if (this.#connection.isOpen && this.#state !== 'reconnecting') this.#connection.send(message);
    else this.#unsent.push(message);
  }

  #hear(message: ServerMessage): void {
    if (this.#half) {
      const status = this.#half;
      this.#half = null;
      if (message.event === 'error') return this.#failed(new SandboxError(status, message.message));
      this.#failed(new SandboxError(status));
    }
    switch (message.event) {
      case 'sandbox_id':
        this.sandboxId = message.sandbox_id;
        this.sandboxToken = message.sandbox_token;
        return;
      case 'stdout':
      case 'stderr':
        return this.#process?.output(message.event, message.data);
      case 'status_update':
        this.emit('status', message.status);
        if (LAST.has(message.status)) this.#armed = false;
        return this.#status(message.status);
    }
  }

  #status(status: SandboxEvent): void {
    switch (status) {
      case 'SANDBOX_RESTORING':
        if (this.#state !== 'reconnecting') this.#move('restoring');
        return;
      case 'SANDBOX_RUNNING':
        return this.#running();
      case 'SANDBOX_EXECUTION_RUNNING':
        this.#settle('exec');
        return;
      case 'SANDBOX_EXECUTION_DONE':
        this.#process?.finish(null);
        return;
      case 'SANDBOX_CHECKPOINTING':
        return this.#move('checkpointing');
      case 'SANDBOX_CHECKPOINTED':
        this.#move('checkpointed');
        this.#settle('checkpoint');
        this.emit('checkpointed');
        return;
      case 'SANDBOX_FILESYSTEM_SNAPSHOT_CREATED':
        this.#move('running');
        this.#settle('snapshot');
        this.emit('filesystem_snapshot_created');
        return;
      case 'SANDBOX_DELETED':
        return this.#deleted();
      case 'SANDBOX_KILLED':
        this.#settle('kill');
        this.#move('closed');
        this.emit('killed');
        return;
    }
    if (BARE.has(status)) this.#failed(new SandboxError(status));
    else if (status.endsWith('_ERROR')) this.#half = status;
  }

  #running(): void {
    this.#armed = true;
    this.#connection.settle();
    const back = this.#state === 'reconnecting';
    this.#move('running');
    for (const message of this.#unsent.splice(0)) this.#connection.send(message);
    if (back) this.emit('reconnected');
    else if (this.#settle('begin')) this.emit('created');
  }

  #deleted(): void {
    this.#process?.finish(new SandboxError('SANDBOX_DELETED'));
    if (this.#state === 'checkpointing' || this.#calls.has('kill')) return;
    this.#move('closed');
    this.#abandon(new SandboxError('SANDBOX_DELETED'));
    this.emit('deleted');
  }

  #failed(error: SandboxError): void {
    switch (error.status) {
      case 'SANDBOX_EXECUTION_ERROR':
      case 'SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR':
        if (!this.#settle('exec', error)) this.emit('error', error);
        return;
      case 'SANDBOX_EXECUTION_IN_PROGRESS_ERROR':
        this.#move('running');
        this.#settle('checkpoint', error);
        return this.emit('checkpoint_error', error);
      case 'SANDBOX_FILESYSTEM_SNAPSHOT_ERROR':
        this.#move('running');
        this.#settle('snapshot', error);
        return this.emit('filesystem_snapshot_error', error);
      case 'SANDBOX_CHECKPOINT_ERROR':
        if (this.#calls.has('checkpoint')) break;
        this.#armed = true; // a handoff that failed: it is still ours
        this.#move('running');
        return this.emit('error', error);
      case 'SANDBOX_KILL_ERROR':
        this.#settle('kill', error);
        return;
      case 'SANDBOX_STDIN_ERROR':
      case 'SANDBOX_EXECUTION_FORCE_KILL_ERROR':
        return this.emit('error', error);
      case 'SANDBOX_IN_USE':
        if (this.#state === 'reconnecting') return; // the old socket is still being torn down: the next attempt tells
    }
    const checkpointing = this.#calls.has('checkpoint');
    this.#move('failed');
    this.#abandon(error);
    if (checkpointing) this.emit('checkpoint_error', error);
    this.emit('failed', error);
  }

  #lost(): void {
    if (this.#state !== 'reconnecting') {
      this.#move('reconnecting');
      this.emit('reconnecting');
    }
    for (const name of ['exec', 'checkpoint', 'snapshot', 'kill'] as const) {
      this.#settle(name, new Error('the connection was lost before the answer came'));
    }
  }

  /** What has arrived is told, so that nothing is missing and nothing comes twice. */
  #reopened(): void {
    const process = this.#process;
    if (!process || process.done) return;
    this.#connection.send({ action: 'reconnect', received: { stdout: process.stdout.received, stderr: process.stderr.received } });
  }

  #over(code: number): void {
    if (this.#half) this.#failed(new SandboxError(this.#half));
    this.#half = null;
    if (!TERMINAL.has(this.#state)) {
      const lost = this.#state === 'reconnecting' || this.#calls.has('begin');
      this.#move(lost ? 'failed' : 'closed');
      if (lost) this.emit('failed', new SandboxError('SANDBOX_ERROR', `the connection was lost (${code})`));
    }
    this.#settle('kill');
    this.#abandon(new SandboxError('SANDBOX_ERROR', `the connection was closed (${code})`));
  }

  /** Nobody is to wait for what can't come any more. */
  #abandon(error: SandboxError): void {
    for (const name of [...this.#calls.keys()]) {
      if (name !== 'kill') this.#settle(name, error);
    }
    this.#process?.finish(error);
  }
}
