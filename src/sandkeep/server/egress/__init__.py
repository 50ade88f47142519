"""A way out for sandboxes, by rules: an HTTP proxy here, reached through the guest. No network, firewall or privilege is needed."""

from sandkeep.server.egress.holding import ENV, Egress, rules_of
from sandkeep.server.egress.rules import ALL, Rules

__all__ = ["ALL", "ENV", "Egress", "Rules", "rules_of"]
