"""One call of a script: what is sent, and how its reply is read. Nothing here speaks to a server.

``request_calls``, ``part_calls`` and ``queue_calls`` describe a call of each script in ``lua/``.
``Protocol``, or any other way to a server, sends the ``words`` of a call and has it read the reply.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from streamq.errors import UNREADABLE, Damaged
from streamq.protocol.keys import QueueKeys, RequestKeys
from streamq.protocol.lua import further_script_keys, script_digest, script_signature

T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True):
    """A call of one script, whose reply is a ``T``."""

    #: The script's name.
    script: str
    #: The keys that its header names are among these.
    keys: RequestKeys | QueueKeys
    #: What its header names as arguments, in that order.
    args: dict[str, Any]
    #: Gives the reply a type. A method of this class would cost each call a little more.
    parse: Callable[[Any], T]
    #: Whether it may be sent again when no answer comes.
    may_repeat: bool = True

    def words(self) -> tuple[Any, ...]:
        """Return the command that makes the call, word by word.

        Raises:
            TypeError: these are not the arguments that the script's header names.
        """
        key_names, arg_names, is_variadic = script_signature(self.script)
        args = self.args
        if tuple(args) != arg_names:
            raise TypeError(f"{self.script}.lua takes {list(arg_names)}, not {list(args)}")
        argv = list(args.values())
        if is_variadic:
            argv.extend(argv.pop())
        keys = self.keys.of(key_names)
        if self.keys.shape:
            keys += self.keys.more(further_script_keys(self.script))
        return ("EVALSHA", script_digest(self.script), len(keys), *keys, *argv)

    def read(self, reply: Any) -> T:
        """Return the reply as its type.

        Raises:
            Damaged: it is not what the script answers.
        """
        try:
            return self.parse(reply)
        except UNREADABLE as error:
            raise self.damaged(error) from error

    def damaged(self, error: Exception) -> Damaged:
        """Return the error of a reply that ``parse`` could not read."""
        return Damaged(f"what {self.script} was told cannot be read: {error}")
