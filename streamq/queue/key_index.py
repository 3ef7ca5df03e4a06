"""Remembers which parts of a request have which keys, while they are loaded."""

from collections.abc import Sequence

from streamq.model import Policy
from streamq.protocol.protocol import Protocol
from streamq.records.inputs import BadInput
from streamq.records.keys import WHOLE, KeyField

#: How many keys one call tells of.
_AT_ONCE = 500


class KeyIndex:
    """The keys of one load. A request without a key costs nothing."""

    def __init__(self, protocol: Protocol, request_id: str, policy: Policy) -> None:
        #: How many records have no key; and how many one that came before.
        self.missing = self.repeated = 0
        self._protocol = protocol
        self._id = request_id
        self._field = KeyField(policy.key, policy.spec) if policy.key else None

    def note(self, first: int, payloads: Sequence[bytes]) -> None:
        """Remember the keys of parts, the first of which has this number.

        This is done before the parts are added. A load that is repeated says the same again.

        Raises:
            BadInput: the first record of all has no key, so the field's name is probably wrong.
        """
        if self._field is None:
            return
        keys = [self._field.of_part(payload) for payload in payloads]
        if first == 1 and keys and keys[0] and keys[0][0] is None:
            what = "no text and no number" if self._field.name == WHOLE else "no field"
            name = "" if self._field.name == WHOLE else f" {self._field.name!r}"
            raise BadInput(f"the first record has {what}{name} to find it by")
        self.tell(first, keys)

    def go_on(self) -> None:
        """Go on with a load that was stopped: forget keys of parts that it never added."""
        if self._field is not None:
            self._protocol.forget_unadded(self._id)

    def tell(self, first: int, keys: Sequence[Sequence[str | None]]) -> None:
        """Remember these keys of parts: one for each record."""
        pairs: list[str | int] = []
        for number, own in enumerate(keys, first):
            self.missing += own.count(None)
            for key in dict.fromkeys(own):
                if key is not None:
                    pairs += (number, key)
        for begin in range(0, len(pairs), 2 * _AT_ONCE):
            self.repeated += self._protocol.index(self._id, pairs[begin : begin + 2 * _AT_ONCE])

    def words(self) -> list[str]:
        """Return in words what is to be known of the keys, if anything is."""
        name = "" if self._field is None else self._field.name
        found = []
        if self.missing:
            found.append(f"records without {name}, which find does not know: {self.missing:,}")
        if self.repeated:
            found.append(
                f"parts with a {name} that came before, of which find shows each: {self.repeated:,}"
            )
        return found
