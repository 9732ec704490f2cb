# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Why a step ran natively: the closed list of reasons, and one finding of such a reason.

A check anywhere in the package returns a `Finding` or None; it never logs, raises or decides. One place (the runner, or
the strategy for a whole fit) acts on it.
"""

import textwrap
from dataclasses import dataclass
from enum import Enum

LONGEST = 400
"""Characters that a part of a message may have."""


class Effect(Enum):
    """What a finding leads to. The value is how the documentation names it.

    Attributes:
        meaning: What that means, in a sentence.
    """

    NATIVE = ("native", "The call is native for as long as this lasts; recordings are kept, and used again afterwards.")
    ANOTHER = ("another recording", "The call has another signature and is recorded by itself; recordings are kept.")
    RETIRED = ("retirement", "The recordings of the module are dropped; it is recorded again after a new warm-up.")

    def __new__(cls, key: str, meaning: str) -> "Effect":
        """Makes the key the value and hangs the meaning on the member."""
        member = object.__new__(cls)
        member._value_ = key
        member.meaning = meaning
        return member

    meaning: str


class Reason(Enum):
    """Why a step, or a part of it, ran natively. The value is the stable key used in reports and JSON.

    Attributes:
        cause: One sentence on what was met.
        cure: What a user can do about it.
    """

    # -- the normal life of a recording
    WARM_UP = (
        "warm_up",
        "The signature is still being observed before it is recorded.",
        "Nothing: this ends by itself.",
    )
    RECORDING = ("recording", "The step trained natively while its recording was made.", "Nothing: once per recording.")
    TIMED = (
        "timed",
        "One of the first steps of a fit, which ReplayMonitor leaves to Lightning to see how long a native step takes.",
        "Nothing: this ends by itself. ReplayMonitor(native_steps=0) does without; what is saved is unknown then.",
    )
    BUDGET = (
        "budget",
        "As many recordings exist as max_recordings allows.",
        "Raise max_recordings, or give the network fewer signatures: pad or bucket shapes, drop_last=True, freeze and"
        " unfreeze less often.",
    )
    NO_REGION = (
        "no_region",
        "training_step called no module that owns trainable parameters and could be recorded; or none of those that"
        " modules=[...] names.",
        'Call the network as a module: self.net(batch), or self(batch) with modules=["self"]. Or leave modules out.',
    )
    NEVER_REPEATS = (
        "never_repeats",
        "Call after call had a signature never met before, another shape or another plain value among the arguments:"
        " more than 20 calls of a network, or 5 whole steps, in a row.",
        "Pass changing numbers as tensors on the device, leave names and ids out, pad or bucket changing shapes.",
    )
    UNRECORDED_MODE = (
        "unrecorded_mode",
        "The call ran without gradients, in inference or evaluation mode, inside of a transformation (torch.func,"
        " forward-mode differentiation), or under a mode that watches operations.",
        "Nothing: such calls are native by design.",
    )
    LAST_BATCH = (
        "last_batch",
        "A signature (shapes and plain values) that is met for the first time as the last batch of an epoch is not"
        " observed.",
        "Nothing if it is rare. drop_last=True in the DataLoader avoids a smaller batch. Where a plain value is new,"
        " such as the index of the batch, pass it as a tensor on the device, or leave it out.",
    )
    AUDIT = (
        "audit",
        "The step ran natively so that its operations could be compared with the recorded ones.",
        "Nothing: audits grow rarer as they find nothing.",
    )
    # -- the fit as a whole
    UNKNOWN_CONTRACT = (
        "unknown_contract",
        "The installed Lightning is not one whose closure contract was inspected, or it was changed at run time.",
        "Install an inspected release (see docs/compatibility) and remove patches of Lightning.",
    )
    NO_CUDA = (
        "no_cuda",
        "The training device is not a CUDA device.",
        'Train on a GPU; backend="tape" runs the engine on a CPU for debugging.',
    )
    MANUAL_OPTIMIZATION = (
        "manual_optimization",
        "The LightningModule optimizes by hand.",
        "Use automatic optimization.",
    )
    NO_OPTIMIZER = ("no_optimizer", "configure_optimizers returned no optimizer.", "Return an optimizer.")
    OPTIMIZER = (
        "optimizer",
        "The optimizer evaluates its closure several times a step.",
        "Use an optimizer that evaluates its closure once (not LBFGS).",
    )
    DETECT_ANOMALY = ("detect_anomaly", "Anomaly detection watches every operation.", "Trainer(detect_anomaly=False).")
    COMPILED_MODULE = (
        "compiled_module",
        "The LightningModule itself was compiled.",
        "Compile a submodule instead: self.net = torch.compile(net).",
    )
    SCRIPTED_MODULE = (
        "scripted_module",
        "The region contains a module of TorchScript, which cannot be compared with what it was.",
        "Use the module that it was made from; or compile it: self.net = torch.compile(net).",
    )
    DATALOADER_ITER = (
        "dataloader_iter",
        "training_step takes a dataloader_iter instead of a batch.",
        "Take a batch: training_step(self, batch, batch_idx).",
    )
    OVERRIDDEN_BACKWARD = (
        "overridden_backward",
        "The LightningModule or the precision plugin overrides backward().",
        "Remove the override and let Lightning call backward; on_after_backward is the place to change gradients.",
    )
    # -- the module
    HOOKS = (
        "hooks",
        "A module in the region has forward or backward hooks; a replay would not run them.",
        "Remove the hooks, or name modules without hooks with modules=[...].",
    )
    REPLACED_FORWARD = (
        "replaced_forward",
        "The module's forward was replaced on the instance.",
        "Undo the replacement (make_graphed_callables and similar wrappers cannot be combined with replay).",
    )
    MODULE_CHANGED = (
        "module_changed",
        "A module, parameter, buffer, attribute or variable that the recording depends on was replaced or changed.",
        "Nothing if it was intended: the region is recorded again. What changes often belongs in a buffer or parameter,"
        " changed in place: self.scale.fill_(value), p.data.copy_(values).",
    )
    ATTRIBUTE_WRITTEN = (
        "attribute_written",
        "The region sets attributes or fills containers; a replay would not.",
        "Set it outside: in training_step if a network does it, in a hook if training_step does. What the region"
        " computes with belongs in a buffer, changed in place.",
    )
    BUFFER_REBOUND = (
        "buffer_rebound",
        "The forward pass replaces a buffer by a new tensor.",
        "Update it in place: self.buf.copy_(new) or self.buf.add_(1).",
    )
    PARAMETER_WRITTEN = (
        "parameter_written",
        "The forward pass changes a parameter in place.",
        "Compute with a changed copy (a parametrization) instead.",
    )
    LOG_IN_REGION = (
        "log_in_region",
        "self.log is called inside the recorded module; a replay would not log.",
        "Log in training_step from the module's results.",
    )
    BATCH_INDEX = (
        "batch_index",
        "training_step uses the index of the batch, which is another number in every step.",
        "Leave the index alone, or compute what depends on it in a hook or in the data.",
    )
    TRAINER_READ = (
        "trainer_read",
        "What is to be recorded reads or sets something of the Trainer, or an optimizer, a scheduler or a callback"
        " that it holds; a replay would not.",
        "Read it in a hook such as on_train_batch_start and keep it in an attribute of the module, or in a buffer.",
    )
    HOST_EFFECT = (
        "host_effect",
        "The region prints, reads or writes a file, looks at a clock, or uses what others share: a queue, a database, a"
        " socket, the environment; a replay would not.",
        "Do it in a hook or in a callback.",
    )
    LOGGED_VALUE = (
        "logged_value",
        "self.log was called in a way that cannot be done again on a replay.",
        "Log tensors or constant numbers, without enable_graph; other arguments should be plain values.",
    )
    METRIC = (
        "metric",
        "training_step updates a metric whose update cannot be replayed (it keeps lists, or shares states with others),"
        " or reads one.",
        "Update it in on_train_batch_end, or use a metric whose states are tensors.",
    )
    SHARED_PARAMETER = (
        "shared_parameter",
        "A parameter or an argument that the region uses several times is used outside of it too: the parts of its"
        " gradient would add up in another order.",
        "Move the outside use into the module, or hand the module a copy of the argument: x.clone().",
    )
    # -- arguments, results, memory
    ARGUMENT = (
        "argument",
        "An argument of the call cannot be taken apart into tensors and plain values.",
        "Pass tensors, numbers, strings, None, and lists, tuples, dicts or dataclasses of these.",
    )
    UNSUPPORTED_TENSOR = (
        "unsupported_tensor",
        "A tensor argument, result or gradient is sparse, nested, a subclass, overlaps itself or is on another device.",
        "Move it to the training device as a plain strided tensor before the call.",
    )
    GRADIENT = (
        "gradient",
        "A parameter has a grad_dtype of its own, or its .grad shares memory with that of another one.",
        "Leave grad_dtype as it is, and give each .grad memory of its own.",
    )
    INPUT_WRITTEN = (
        "input_written",
        "The forward pass changes one of its arguments in place.",
        "Clone the argument inside the module first.",
    )
    OUTPUT_ALIAS = (
        "output_alias",
        "A result shares memory with an argument, a parameter, a buffer or another result.",
        "Return a copy: x.clone().",
    )
    RESULT = (
        "result",
        "The result of the call cannot be taken apart, or it changed its structure between two calls of one signature.",
        "Return tensors, plain values, and lists, tuples, dicts or dataclasses of these.",
    )
    NO_GRADIENT = (
        "no_gradient",
        "No result of the call received a gradient.",
        "Nothing: there is no backward pass to replay.",
    )
    FOREIGN_GRAPH = (
        "foreign_graph",
        "The forward pass uses trainable tensors that are neither its arguments nor its own parameters.",
        "Pass them as arguments or register them as parameters of the module.",
    )
    # -- what a recording cannot hold
    HOST_SYNC = (
        "host_sync",
        "The region waits for the device: .item(), nonzero, boolean masks, bincount, prints, copies to the host.",
        "Keep the value on the device, or do it outside: in training_step if a network does it, in a hook if"
        " training_step does.",
    )
    HOST_TENSOR = (
        "host_tensor",
        "The region uses a CPU tensor that it did not make from constants, or that held other values in another step.",
        "Create the tensor on the device, or register it as a buffer.",
    )
    HOST_RANDOM = (
        "host_random",
        "The region draws random numbers on the host (Python, NumPy, CPU torch) or from a private generator.",
        "Use the device's default generator, or draw outside and pass them in: in training_step if a network draws, in"
        " a hook if training_step does.",
    )
    PYTHON_VALUE = (
        "python_value",
        "A Python number, or the choice of operations, differed between two steps of one signature.",
        "Make it a tensor on the device; or an attribute of the module, if it changes rarely.",
    )
    HOST_READ = (
        "host_read",
        "A number that the region reads from the device differs from the recorded one: Python may go another way.",
        "Nothing if it is rare; else do what depends on it in training_step, outside of the network.",
    )
    TOO_SMALL = (
        "too_small",
        "A part of a network that cannot be recorded as a whole launches too few operations to pay for its replay.",
        "Nothing; or make the whole network recordable, see its own reason.",
    )
    HIDDEN_STATE = (
        "hidden_state",
        "An RNN of several layers trains with dropout, whose generator lives in cuDNN and cannot be put back.",
        "Use dropout=0 in the RNN and nn.Dropout between layers.",
    )
    HIGHER_ORDER = (
        "higher_order",
        "The region's results were differentiated with create_graph=True.",
        "Nothing: gradients of gradients are native by design.",
    )
    REPEATED_BACKWARD = (
        "repeated_backward",
        "The region was differentiated more than once for one forward pass, or outside of Lightning's backward.",
        "Nothing: such steps are native by design.",
    )
    PENDING = (
        "pending",
        "An earlier call still waits for its backward pass, and its activations must not be overwritten.",
        "Drop references to outputs of earlier steps that will never be differentiated.",
    )
    COTANGENTS = (
        "cotangents",
        "The gradient reached other results, or arrived in another layout, than when the region was recorded.",
        "Let the same results contribute to the loss in every step.",
    )
    # -- failures
    CAPTURE_FAILED = (
        "capture_failed",
        "Warm-up or capture raised an error.",
        "Read the error in the message; report it if it looks like ours.",
    )
    OUT_OF_MEMORY = (
        "out_of_memory",
        "There was not enough device memory for a recording.",
        "Lower max_recordings or the batch size.",
    )
    REPLAY_FAILED = (
        "replay_failed",
        "A replay raised an error; the call was run natively instead, and the recording dropped.",
        "Read the error in the message; report it if it looks like ours.",
    )
    MISMATCH = (
        "mismatch",
        "A trial replay of a real batch differed from the native result.",
        "Report it with the message; the region stays native. A compiled network on the tape backend may end so.",
    )
    INVALIDATED = ("invalidated", "Recordings were dropped on request.", "Nothing: they are made again.")
    # -- the gradient norm
    NORM_VALUE = (
        "norm_value",
        "Gradients were clipped by value; only clipping by norm is recorded.",
        'Trainer(gradient_clip_algorithm="norm"), or leave it: clipping by value is native by design.',
    )
    NORM_OVERRIDDEN = (
        "norm_overridden",
        "Clipping goes its own way: an override of configure_gradient_clipping, or a replaced torch function.",
        "Call self.clip_gradients(...) in the override, and leave torch.nn.utils.clip_grad_norm_ as it is.",
    )
    NORM_PRECISION = (
        "norm_precision",
        "The precision plugin clips in its own way, so it was left as it is.",
        "Use a precision plugin that inherits clipping from Lightning's.",
    )
    NORM_LAYOUT = (
        "norm_layout",
        "A gradient is a view into other memory, not dense, a subclass, complex, or has history.",
        "Let autograd make the gradients, without flattening them into one buffer.",
    )
    NORM_SPARSE = ("norm_sparse", "A gradient is sparse.", "Use dense gradients: nn.Embedding(..., sparse=False).")
    NORM_ALIASED = (
        "norm_aliased",
        "Two gradients share memory, or a parameter is in the optimizer twice.",
        "Give each parameter to the optimizer once, and leave .grad to autograd.",
    )
    NORM_ERROR_IF_NONFINITE = (
        "norm_error_if_nonfinite",
        "An error was asked for if the norm is not finite, which waits for the device.",
        "Leave error_if_nonfinite=False and look at last_gradient_norm now and then.",
    )
    NORM_DEVICES = ("norm_devices", "Gradients lie on several devices.", "Keep the parameters on one device.")
    NORM_TORCH = (
        "norm_torch",
        "The installed torch has no torch.nn.utils.get_total_norm.",
        "Install a newer torch.",
    )
    NORM_MODE = (
        "norm_mode",
        "Gradients were clipped under autocast, or under a mode that watches torch's operations.",
        "Clip outside of it, as Lightning does.",
    )
    NORM_MOVED = (
        "norm_moved",
        "The gradients lay in other memory than the recorded ones, as those of a native step between replayed ones do.",
        "Nothing if it is rare: the next step that finds them in recorded memory is replayed, and memory met again is"
        " recorded too. A ReplayPrecision beside a ReplayStrategy(capture_gradient_norm=False): leave both out.",
    )
    NORM_NO_LIMIT = (
        "norm_no_limit",
        "The Trainer was given no limit, or one of 0: there was nothing to clip.",
        "Nothing; Trainer(gradient_clip_val=1.0) clips, if it was meant to.",
    )
    NORM_DRIFT = (
        "norm_drift",
        "The set of gradients, a layout or the stream was not as recorded.",
        "Nothing if it was intended: a new pattern that lasts is recorded. Otherwise let the same parameters get"
        " gradients in every step.",
    )
    NORM_RETIRED = (
        "norm_retired",
        "The gradients changed too often; clipping is native for the rest of the fit.",
        "Let the same parameters get gradients in every step, or leave clipping native: capture_gradient_norm=False,"
        " or no ReplayPrecision.",
    )

    def __new__(cls, key: str, cause: str, cure: str) -> "Reason":
        """Makes the key the value and hangs cause and cure on the member."""
        member = object.__new__(cls)
        member._value_ = key
        member.cause = cause
        member.cure = cure
        return member

    cause: str
    cure: str

    @property
    def is_harmless(self) -> bool:
        """Tells whether a healthy run meets it. It is counted then, never warned about and never an error."""
        return self in _HARMLESS


_HARMLESS = frozenset(
    {
        Reason.WARM_UP,
        Reason.RECORDING,
        Reason.TIMED,
        Reason.UNRECORDED_MODE,
        Reason.LAST_BATCH,
        Reason.INVALIDATED,
        Reason.AUDIT,
        Reason.NORM_MOVED,
        Reason.NORM_NO_LIMIT,
        Reason.NORM_VALUE,
        Reason.TOO_SMALL,  # comes after the reason for which the whole was refused
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason met at one place.

    Attributes:
        reason: Which of the known reasons.
        where: Dotted path of the module, argument or attribute concerned.
        expected: What a replay needs, in words.
        actual: What was met, in words.
        effect: What it leads to, beside this call being native.
    """

    reason: Reason
    where: str
    expected: str = ""
    actual: str = ""
    effect: Effect = Effect.NATIVE

    def __str__(self) -> str:
        return five_parts(
            what=f"{self.reason.cause} [{self.reason.value}]",
            where=self.where,
            expected=self.expected,
            actual=self.actual,
            cure=self.reason.cure,
        )


def five_parts(what: str, where: str, expected: str, actual: str, cure: str) -> str:
    """Formats every message of the package: what happened, where, expected, actual, what to do."""
    lines = [what, f"  where:    {where}"]
    if expected:
        lines.append(f"  expected: {_shortened(expected)}")
    if actual:
        lines.append(f"  actual:   {_shortened(actual)}")
    lines.append(f"  to do:    {cure}")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    """Cuts what is too long to be read: a signature with hundreds of strings in it, for example."""
    return text if len(text) <= LONGEST else textwrap.shorten(text, LONGEST, placeholder=" ...")
