# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What may change between two steps of a recorded call, and what that leads to."""

from enum import Enum

from lightning_replay.reasons import Effect


class Change(Enum):
    """A change since a recording was made. The value is how the documentation names it.

    Attributes:
        effect: What it leads to.
    """

    HOOKS = ("A hook is put on a module of the network, or on all modules", Effect.NATIVE)
    EVALUATION = ("The network is put into evaluation mode", Effect.NATIVE)
    GRADIENTS_OFF = ("It is called under `no_grad` or inference mode", Effect.NATIVE)
    WATCHED = (
        "It is called under activation checkpointing, anomaly detection, or a mode that intercepts torch's operations",
        Effect.NATIVE,
    )
    ARGUMENTS = ("An argument is no plain tensor on the device, and no plain value", Effect.NATIVE)
    FORWARD = ("Its own `forward` is replaced on the instance", Effect.NATIVE)
    PENDING = ("An earlier call still waits for its backward pass", Effect.NATIVE)
    TENSORS = (
        "A tensor argument has another shape, stride, dtype, alignment or trainability, or shares memory with others",
        Effect.ANOTHER,
    )
    VALUES = ("A plain value among the arguments is another, or they are nested in another way", Effect.ANOTHER)
    SWITCHES = (
        "Autocast, the default dtype, or one of torch's switches (deterministic algorithms, TF32, cuDNN) is set",
        Effect.ANOTHER,
    )
    FLAGS = ("A part is put into evaluation mode, or a parameter is frozen or unfrozen", Effect.ANOTHER)
    MEMBERS = ("A module, parameter or buffer is replaced, added or removed", Effect.RETIRED)
    MEMORY = ("A parameter or buffer moves to other memory, or has another shape, stride or dtype", Effect.RETIRED)
    CODE = ("The class of a module, the `forward` of its class, or the body of a function, is another", Effect.RETIRED)
    ATTRIBUTE = ("An attribute that the code of the network names has another value", Effect.RETIRED)
    VARIABLE = ("A global, closure variable or class attribute that it names has another value", Effect.RETIRED)
    CONTENTS = ("A container, or an object of your own class, in one of these holds something else", Effect.RETIRED)
    OPERATIONS = ("An audit finds other operations, numbers, or values made on the host", Effect.RETIRED)

    def __new__(cls, text: str, effect: Effect) -> "Change":
        """Makes the text the value and hangs the effect on the member."""
        member = object.__new__(cls)
        member._value_ = text
        member.effect = effect
        return member

    effect: Effect
