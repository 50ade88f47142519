/** What the REST API says, in its own words. Times are seconds since 1970. */

export type Level = 'memory' | 'relaunched' | 'files';

export interface Limits {
  memory?: number | string | null;
  cpus?: number | null;
  pids?: number | null;
}

export interface NewSandbox {
  base?: string;
  runtime?: 'auto' | 'runc' | 'crun' | 'runsc';
  env?: Record<string, string>;
  secrets?: Record<string, string>;
  limits?: Limits;
  network?: 'none' | 'host';
  cwd?: string;
  metadata?: Record<string, unknown>;
  project?: string;
  from_checkpoint?: string;
  require?: Level;
  auto_pause_timeout?: number;
  paused_expiry?: number;
  egress?: EgressRules;
}

/** Names, `*.` and a name, addresses, networks. `allow` wins over `deny`; alone it means only that; `{}` is everything. */
export interface EgressRules {
  allow?: string[];
  deny?: string[];
}

export interface SandboxInfo {
  id: string;
  state: 'CREATING' | 'RUNNING' | 'PAUSING' | 'PAUSED' | 'RESUMING' | 'KILLED' | 'ERROR';
  project: string | null;
  metadata: Record<string, unknown>;
  created: number;
  last_activity: number;
  auto_pause_timeout: number;
  paused_expiry: number;
  paused_at: number | null;
  checkpoint: string | null;
  host: string | null;
  base: string;
  runtime: string;
  network: string;
  egress: EgressRules | null;
  limits: Limits;
  forked_from: string | null;
}

export interface CommandResult {
  stdout: string;
  stderr: string;
  exit_code: number;
  duration_ms: number;
  error_class: 'TIMEOUT' | 'KILLED' | 'CANCELLED' | 'NOT_FOUND' | null;
  truncated: boolean;
}

export interface ProcessInfo {
  pid: number;
  argv: string[];
  cwd: string;
  running: boolean;
  exit_code: number | null;
  started: number;
  pty: boolean;
  tag: string | null;
  background: boolean;
  ports: number[];
}

export interface FileInfo {
  path: string;
  name: string;
  kind: 'file' | 'dir' | 'symlink' | 'fifo' | 'socket' | 'device';
  size: number;
  mode: number;
  uid: number;
  gid: number;
  mtime_ns: number;
  target: string | null;
}

export interface SnapshotInfo {
  id: string;
  comment: string;
  timestamp: number;
  layers: string[];
  how: string;
}

export interface CheckpointInfo {
  id: string;
  hash: string;
  parent_id: string | null;
  tag: string | null;
  comment: string | null;
  timestamp: string;
  size_bytes: number;
  new_bytes: number;
  base: string;
  scope: string;
  excluded: string[];
  memory: boolean;
  metadata: Record<string, unknown>;
}

export interface RestoreReport {
  level: Level;
  relaunched: string[];
  lost: string[];
  why: string;
}

export interface HistoryEntry {
  index: number;
  command: string;
  timestamp: number;
}
