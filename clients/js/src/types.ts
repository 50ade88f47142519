/** The words of the WebSocket protocol, as the server says them. */

export const SandboxEvent = {
  SANDBOX_ERROR: 'SANDBOX_ERROR',
  SANDBOX_CREATING: 'SANDBOX_CREATING',
  SANDBOX_RUNNING: 'SANDBOX_RUNNING',
  SANDBOX_NOT_FOUND: 'SANDBOX_NOT_FOUND',
  SANDBOX_IN_USE: 'SANDBOX_IN_USE',
  SANDBOX_CREATION_ERROR: 'SANDBOX_CREATION_ERROR',
  SANDBOX_RESTORING: 'SANDBOX_RESTORING',
  SANDBOX_RESTORE_ERROR: 'SANDBOX_RESTORE_ERROR',
  SANDBOX_PERMISSION_DENIAL_ERROR: 'SANDBOX_PERMISSION_DENIAL_ERROR',
  SANDBOX_EXECUTION_RUNNING: 'SANDBOX_EXECUTION_RUNNING',
  SANDBOX_EXECUTION_DONE: 'SANDBOX_EXECUTION_DONE',
  SANDBOX_EXECUTION_ERROR: 'SANDBOX_EXECUTION_ERROR',
  SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR: 'SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR',
  SANDBOX_EXECUTION_IN_PROGRESS_ERROR: 'SANDBOX_EXECUTION_IN_PROGRESS_ERROR',
  SANDBOX_EXECUTION_FORCE_KILLED: 'SANDBOX_EXECUTION_FORCE_KILLED',
  SANDBOX_EXECUTION_FORCE_KILL_ERROR: 'SANDBOX_EXECUTION_FORCE_KILL_ERROR',
  SANDBOX_STDIN_ERROR: 'SANDBOX_STDIN_ERROR',
  SANDBOX_CHECKPOINTING: 'SANDBOX_CHECKPOINTING',
  SANDBOX_CHECKPOINTED: 'SANDBOX_CHECKPOINTED',
  SANDBOX_CHECKPOINT_ERROR: 'SANDBOX_CHECKPOINT_ERROR',
  SANDBOX_FILESYSTEM_SNAPSHOT_CREATING: 'SANDBOX_FILESYSTEM_SNAPSHOT_CREATING',
  SANDBOX_FILESYSTEM_SNAPSHOT_CREATED: 'SANDBOX_FILESYSTEM_SNAPSHOT_CREATED',
  SANDBOX_FILESYSTEM_SNAPSHOT_ERROR: 'SANDBOX_FILESYSTEM_SNAPSHOT_ERROR',
  SANDBOX_DELETING: 'SANDBOX_DELETING',
  SANDBOX_DELETED: 'SANDBOX_DELETED',
  SANDBOX_KILLING: 'SANDBOX_KILLING',
  SANDBOX_KILLED: 'SANDBOX_KILLED',
  SANDBOX_KILL_ERROR: 'SANDBOX_KILL_ERROR',
  SANDBOX_LOCK_ACQUIRING: 'SANDBOX_LOCK_ACQUIRING',
  SANDBOX_LOCK_ACQUIRED: 'SANDBOX_LOCK_ACQUIRED',
  SANDBOX_LOCK_RELEASE_REQUESTED: 'SANDBOX_LOCK_RELEASE_REQUESTED',
  SANDBOX_LOCK_RENEWAL_ERROR: 'SANDBOX_LOCK_RENEWAL_ERROR',
  SANDBOX_LOCK_RELEASING: 'SANDBOX_LOCK_RELEASING',
  SANDBOX_LOCK_RELEASED: 'SANDBOX_LOCK_RELEASED',
} as const;
export type SandboxEvent = keyof typeof SandboxEvent;

export const EventType = {
  STATUS_UPDATE: 'status_update',
  SANDBOX_ID: 'sandbox_id',
  STDOUT: 'stdout',
  STDERR: 'stderr',
  ERROR: 'error',
} as const;

export type ServerMessage =
  | { event: 'status_update'; status: SandboxEvent }
  | { event: 'sandbox_id'; sandbox_id: string; sandbox_token: string }
  | { event: 'stdout' | 'stderr'; data: string }
  | { event: 'error'; message: string };

export type SandboxState =
  | 'creating'
  | 'restoring'
  | 'running'
  | 'reconnecting'
  | 'filesystem_snapshotting'
  | 'checkpointing'
  | 'checkpointed'
  | 'closed'
  | 'failed';

/** States that nothing leads out of. */
export const TERMINAL: ReadonlySet<SandboxState> = new Set(['checkpointed', 'closed', 'failed']);

export type Language = 'python' | 'bash';

export interface ConnectOptions {
  /** Attach again, with growing pauses, when the socket is lost. */
  enableAutoReconnect?: boolean;
  enableDebug?: boolean;
  debugLabel?: string;
  /** For servers that want a key. */
  apiKey?: string;
  /** For the `ws` package in Node: headers, certificates. Browsers have no such options. */
  wsOptions?: Record<string, unknown>;
  /** Pauses between attempts to reconnect, in milliseconds. */
  backoff?: { first?: number; most?: number; giveUpAfter?: number };
}

export interface CreateOptions extends ConnectOptions {
  /**
   * Seconds without activity until the sandbox is put away; 0 is never. Without a word the server's 300 s, and then it is
   * put to sleep, never deleted. A time-out that is given deletes a sandbox without `enableCheckpoint`, and what was in it.
   */
  idleTimeout?: number;
  /** Default false. With it an idle sandbox is put to sleep, not deleted: `attach` wakes it. */
  enableCheckpoint?: boolean;
  /** The same as `enableCheckpoint`. */
  enableSandboxCheckpoint?: boolean;
  /** Default false: a second client is refused while one is attached. */
  enableSandboxHandoff?: boolean;
  /** Default false. The forerunner's word for what `enableCheckpoint` alone does here: an idle sandbox sleeps. */
  enableIdleTimeoutAutoCheckpoint?: boolean;
  /** Default none: what `snapshotFilesystem(name)` has kept. */
  filesystemSnapshotName?: string;
}

/** What went wrong. `message` is the status; `detail` what the server said of it. */
export class SandboxError extends Error {
  readonly detail: string;
  constructor(
    readonly status: string,
    detail = '',
  ) {
    super(status);
    this.name = 'SandboxError';
    this.detail = detail;
  }
}
