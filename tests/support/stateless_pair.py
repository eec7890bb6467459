"""Two stateless instances that know each other, as a router would have told them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from support.hop_commands import ANSWER_TOKENS, Instance, next_room, stateless
from support.serving import Prompt, until


@dataclass
class Pair:
    first: Instance
    second: Instance

    def tell(self) -> None:
        """What a router does: everybody's address and incarnation, then wait until all are connected."""
        both = (self.first, self.second)
        for own, other in (both, both[::-1]):
            peer = {**other.address, "incarnation": stateless(other.client)["incarnation"]}
            own.client.server.post("/pla/peers", {"self": own.address, "peers": [peer]})
        for instance in both:
            until(
                lambda instance=instance: set(instance.client.server.get("/pla/peers")["peers"].values()) == {"ready"},
                what=f"the peers of {instance.name} ready",
            )

    @property
    def described(self) -> dict[str, Any]:
        """As the state file of a cluster says it."""
        instances = (self.first, self.second)
        return {"instances": [one.address | {"url": one.client.server.url} for one in instances]}

    def submit(
        self, source: Instance, target: Instance, prompt: Prompt, new_tokens: int = ANSWER_TOKENS, **body: Any
    ) -> tuple[Future[dict[str, Any]], Future[dict[str, Any]]]:
        """Both legs of a request, as a router sends them; the decode part answers it."""
        legs = self.leg_fields(source) | body
        return (
            source.client.submit(prompt, new_tokens, **legs),
            target.client.submit(prompt, new_tokens, **legs),
        )

    @staticmethod
    def leg_fields(source: Instance) -> dict[str, Any]:
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": source.client.server.bootstrap_port,
            "bootstrap_room": next_room(),
        }

    def assert_at_rest(self) -> None:
        """No leg, no page, no row is left; the host's own leak check runs whenever it is idle."""
        for instance in (self.first, self.second):
            until(lambda instance=instance: is_empty(stateless(instance.client)), what="no leg left")
            instance.client.flush()
            assert instance.client.server.is_alive()
            assert "Traceback" not in instance.client.server.log_text()


def is_empty(state: dict[str, Any]) -> bool:
    held = (state["sending"]["kv_tokens"], state["receiving"]["kv_tokens"], state["quarantine"]["requests"])
    return not any(held) and not state["sending"]["legs"] and not any(state["receiving"]["legs"].values())
