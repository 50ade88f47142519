/** A TCP proxy before the server, to cut connections without a word. */

import { createConnection, createServer, type Server, type Socket } from 'node:net';

export class Proxy {
  attempts = 0;
  #refusing = false;
  readonly #sockets = new Set<Socket>();

  private constructor(
    private readonly server: Server,
    readonly url: string,
  ) {}

  static async start(target: string): Promise<Proxy> {
    const { hostname, port } = new URL(target);
    const server = createServer((client) => {
      proxy.attempts++;
      if (proxy.#refusing) return client.destroy();
      const upstream = createConnection(Number(port), hostname);
      for (const [one, other] of [[client, upstream], [upstream, client]] as const) {
        proxy.#sockets.add(one);
        one.on('error', () => undefined);
        one.on('close', () => {
          proxy.#sockets.delete(one);
          other.destroy();
        });
        one.pipe(other);
      }
      return undefined;
    });
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const proxy = new Proxy(server, `ws://127.0.0.1:${(server.address() as { port: number }).port}`);
    return proxy;
  }

  cut(): void {
    for (const socket of this.#sockets) socket.destroy();
  }

  async refuse(): Promise<void> {
    this.#refusing = true;
    this.attempts = 0;
    this.cut();
  }

  async stop(): Promise<void> {
    this.cut();
    await new Promise((resolve) => this.server.close(resolve));
  }
}
