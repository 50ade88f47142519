/** Sandkeep for Node and browsers: `Sandbox` over the WebSocket protocol, `Sandkeep` over REST. */

export { Emitter } from './emitter.js';
export { OutputStream, SandboxProcess } from './process.js';
export { Sandbox, type SandboxEvents } from './sandbox.js';
export { type ConnectOptions, type CreateOptions, EventType, type Language, SandboxError, SandboxEvent, type SandboxState } from './types.js';
export { Commands, Process, type RunOptions } from './rest/commands.js';
export { Files } from './rest/files.js';
export { SandkeepError, type ServerOptions } from './rest/http.js';
export type * from './rest/nouns.js';
export { Checkpoints, RemoteSandbox, Sandkeep } from './rest/server.js';
export { Terminal, type TerminalOptions } from './rest/terminal.js';
