"""Codes of what goes wrong while a plan and a model become a program, and while that runs."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity

PROGRAM_CODES: Final[tuple[CatalogueEntry, ...]] = (
    CatalogueEntry(
        code="TP107",
        name="body-not-local",
        severity=Severity.ERROR,
        summary="A module's forward can't run on local shards.",
        explanation="""
The module's own Python does something that needs more than one rank's shard: it reduces over a sharded dim, or it
bakes in a global number, as in `view(batch, length, self.num_heads, head_dim)`. The message names the operation and
its line. If it's a number, name the attribute in `local`, and it's divided by the size of the axis. Otherwise keep
the value whole there: make the linear that shards it `replicate`, or pin its `output`.
""",
        bad="""
version: 1
modules:
  h.*.attn.c_attn: {style: colwise, packed: [q, k, v]}
""",
        good="""
version: 1
modules:
  h.*.attn: {style: replicate, local: [num_heads, split_size]}
  h.*.attn.c_attn: {style: colwise, packed: [q, k, v]}
""",
    ),
    CatalogueEntry(
        code="TP108",
        name="already-parallel",
        severity=Severity.ERROR,
        summary="The model is parallel already.",
        explanation="""
`parallelize` rewrites a stock module, and this one holds DTensor parameters or has been rewritten before; sharding
the shards would be wrong. Start from a fresh model. To combine with FSDP, call `parallelize` first and `fully_shard`
after it.
""",
        bad="""
model = tpplan.parallelize(model, plan)
model = tpplan.parallelize(model, plan)
""",
        good="""
model = tpplan.parallelize(model, plan)
""",
    ),
    CatalogueEntry(
        code="TP110",
        name="capture-failed",
        severity=Severity.ERROR,
        summary="The model itself failed on the example inputs.",
        explanation="""
The compiler runs the model once on meta tensors, which have shapes but no values, and the model raised. The note names
the line. If the forward reads values (`.item()`, `.tolist()`, `.numpy()`) that follow from its inputs, such as sizes of
pictures, pass `inputs=` with numbers. If they follow from parameters or activations, use tensor operations instead, or
read them outside of the forward. A model that makes its layers in its first call, as lazy modules do, has to be called
before; one that sets a new module on itself in each call should make it in `__init__`. Operators without a kernel for
meta tensors, TorchScript and transforms of `torch.func` around modules can't be captured. Otherwise call the model on
the same inputs without tpplan: they may not be what it accepts.
""",
    ),
    CatalogueEntry(
        code="TP111",
        name="inputs-needed",
        severity=Severity.ERROR,
        summary="No example inputs could be made for the model.",
        explanation="""
For transformers models tpplan makes example inputs from the config. For any other model, pass them: a dict of keyword
arguments, or a tuple. Fake or meta tensors will do; only shapes and dtypes count, unless the model reads whole numbers
of its inputs.
""",
        bad="""
model = tpplan.parallelize(my_model, plan)
""",
        good="""
model = tpplan.parallelize(my_model, plan, inputs=(torch.empty(2, 128, 512, device="meta"),))
""",
    ),
    CatalogueEntry(
        code="TP113",
        name="in-place-mutation",
        severity=Severity.ERROR,
        summary="A forward writes in place through a view of a sharded value.",
        explanation="""
The value has one placement where it's written and another where it's read through the view, so the write wouldn't reach
the view. Write the result to a new tensor, or keep the value whole with `replicate`.
""",
    ),
    CatalogueEntry(
        code="TP115",
        name="mesh-mismatch",
        severity=Severity.ERROR,
        summary="The plan's axis isn't in the mesh, or has the wrong size there.",
        explanation="""
The plan shards over the mesh axis that `axis:` names, `tp` by default. The device mesh has to have an axis of that
name, whose size is the number of ranks that the program was compiled for.
""",
        bad="""
model = tpplan.parallelize(model, plan, mesh=init_device_mesh("cuda", (8,), mesh_dim_names=("model",)))
""",
        good="""
model = tpplan.parallelize(model, plan, mesh=init_device_mesh("cuda", (8,), mesh_dim_names=("tp",)))
""",
    ),
    CatalogueEntry(
        code="TP116",
        name="program-mismatch",
        severity=Severity.ERROR,
        summary="The ranks compiled different programs.",
        explanation="""
Each rank compiles the program itself, and the programs are compared before the model is rewritten: ranks with different
programs would deadlock. Use the same plan, config and versions of torch, transformers and tpplan on every rank. A model
that iterates over a set of strings does so in another order in each process. That is fine where order means nothing. If
ranks would exchange tensors, draw random numbers or add up in another order, the message says where.
""",
    ),
    CatalogueEntry(
        code="TP117",
        name="unproved-call",
        severity=Severity.ERROR,
        summary="A call differs from the one that the program was proved for.",
        explanation="""
A program is proved for a kind of call: which arguments are passed, their dtypes, their number of dims and the values
of flags; sizes may vary. A call of another kind is proved the first time it occurs, and runs by the same program or by
one of its own. This call can't be proved, or it would need parameters or caches laid out differently; the message says
how it differs from the example. Compile with example inputs of this kind.
""",
        bad="""
model = tpplan.parallelize(model, plan, inputs={"input_ids": ids})
model(inputs_embeds=embeddings)
""",
        good="""
model = tpplan.parallelize(model, plan, inputs={"inputs_embeds": embeddings})
model(inputs_embeds=embeddings)
""",
    ),
    CatalogueEntry(
        code="TP118",
        name="uneven-sequence",
        severity=Severity.ERROR,
        summary="A call's sequence can't be split evenly over the axis.",
        explanation="""
Under sequence parallelism each rank holds an equal part of the sequence between the blocks. A call whose sequence the
axis doesn't divide, such as a token in decoding, runs by a second program, compiled from the same plan with all
sequences whole. This code remains for calls where that isn't possible: the inputs don't show the length of the
sequence (it's created in the body, as the patches of an image are), a module inside the model is called by itself, or
the plan can't be compiled without `sequence`. Pad the sequence to a multiple of the axis's size there, or
parallelize with a plan without `sequence` styles.
""",
    ),
    CatalogueEntry(
        code="TP119",
        name="randomness-mixed",
        severity=Severity.ERROR,
        summary="A forward doesn't draw random numbers for replicated and sharded values in the expected order.",
        explanation="""
Where a value is replicated every rank has to draw the same numbers, and where it's sharded different ones. In a forward
that does both, each draw gets its stream by its position in the example. This code is for calls where those positions
don't apply: the forward draws more or less often than in the example (a dropout was switched on or off since, or
another path was taken); an activation checkpoint inside it recomputes a part of it; or a module that it calls for both
(one `nn.Dropout` in two places) is called by itself. A call that draws nothing, as in evaluation, is always fine.
""",
        bad="""
layer.activation_dropout = 0.0  # the forward's other dropouts go on
""",
        good="""
layer.activation_dropout = 0.0
model = tpplan.parallelize(model, plan, inputs=inputs)
""",
    ),
    CatalogueEntry(
        code="TP121",
        name="checkpoint-mismatch",
        severity=Severity.ERROR,
        summary="The checkpoint doesn't fit the model.",
        explanation="""
A tensor is missing from the checkpoint, or its shape or dtype differs from the unsharded model's (floating-point
numbers are cast, quantised ones never); or the checkpoint itself is broken: a file that was cut off, a header or an
index that contradicts the files, no safetensors at all; or the folder that `tpplan.from_pretrained` is to load has no
config that it can use. All that is wrong is listed, and raised on every rank, before
any of them changes its model. Checkpoints hold whole tensors under the stock model's names, whatever the plan. As a
warning, it tells of tensors that the model doesn't have, and of numbers that aren't finite.
""",
        bad="""
tpplan.load_weights(llama_8b, "Llama-3.2-1B")
""",
        good="""
tpplan.load_weights(llama_1b, "Llama-3.2-1B")
""",
    ),
    CatalogueEntry(
        code="TP122",
        name="model-reference",
        severity=Severity.ERROR,
        summary="The model that `--model` names can't be loaded.",
        explanation="""
`--model` takes a folder or a file with a transformers `config.json`, `hf:MODEL_TYPE` for an architecture's default
config (`--set key=value` overrides its fields), or `package.module:callable`, which is called and returns a module.
Nothing is downloaded.
""",
        bad="$ tpplan validate llama --model hf:lama --tp 8",
        good="$ tpplan validate llama --model hf:llama --tp 8",
    ),
    CatalogueEntry(
        code="TP123",
        name="nothing-to-shard",
        severity=Severity.ERROR,
        summary="No plan could be found for a model.",
        explanation="""
`tpplan suggest` pairs linear layers by data flow, and keeps what the compiler proves. In this model no pair is
left. The notes say why for the largest layers: something between them needs all features at once, or
their sizes don't divide by the number of ranks. Another number of ranks helps only in the second case, and the message
says which it is.
""",
        bad="$ tpplan suggest --model my_package.models:six_heads --tp 4",
        good="$ tpplan suggest --model my_package.models:six_heads --tp 2",
    ),
    CatalogueEntry(
        code="TP124",
        name="recorded-body",
        severity=Severity.NOTE,
        summary="A module's body runs operation by operation from its record.",
        explanation="""
Some bodies derive sizes from sizes, so that no attribute of theirs could be made local: `width // heads`, or
`nn.MultiheadAttention`, whose heads are counted inside of torch. Such a body is recorded on tensors of whole
shapes, and its operations then run on a rank's shards with the sizes made local; the check runs them as well. The
result is the same. So does a body that makes a whole value and reads it beside heads that are split, such as biases by
distance: between its operations each rank takes the part of its heads, or exchanges a value (TP147). What is lost is
speed: a call with new shapes is recorded first. `scaled_dot_product_attention` stays one call.
""",
        bad="""
class Attention(nn.Module):
    def forward(self, x):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, width // self.heads)
""",
        good="""
class Attention(nn.Module):
    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, -1, self.head_size)
""",
    ),
    CatalogueEntry(
        code="TP125",
        name="part-with-the-caller",
        severity=Severity.NOTE,
        summary="A call leaves a rank's part of a tensor in a list or dict that the caller passed.",
        explanation="""
Keys and values that a forward puts into lists, dicts or dataclasses among its arguments are those of this rank's heads.
Later calls of the model recognise them by their sizes, even if the caller has reordered, sliced or copied them, and use
them as they are. Only a caller that reads such a tensor itself sees less than the unsharded model would have stored.
""",
    ),
    CatalogueEntry(
        code="TP126",
        name="single-head",
        severity=Severity.NOTE,
        summary="A column-wise layer produces a single head, and stays whole on every rank.",
        explanation="""
In multi-query attention all queries use the same key and value head. The queries are split among the ranks, and each of
them needs that head, so a `colwise` rule on the layer that produces it replicates the layer: its weight is stored, and
its product is computed, on every rank. That's correct, and usually cheap. A `replicate` rule makes it explicit and
silences the note; a model with more heads splits them by the same `colwise` rule.
""",
    ),
    CatalogueEntry(
        code="TP127",
        name="unaudited-operator",
        severity=Severity.ERROR,
        summary="An operator that isn't in the table of audited operators meets a sharded or partial value.",
        explanation="""
A rule says what an operator yields for shards, and the compiler uses a rule only if a test has checked it numerically,
forward and backward (`ops/registry.py` is the list). An operator that isn't in the list, such as a custom one,
runs on whole values only: write `output: replicate` for the module whose result it reads, or
leave out the rules of the module that calls it.
""",
    ),
    CatalogueEntry(
        code="TP128",
        name="unproved-backward",
        severity=Severity.ERROR,
        summary="A custom backward isn't correct on a rank's part of the gradients.",
        explanation="""
The backward of torch's own operators follows from their derivatives. That of a `torch.autograd.Function`, of a custom
operator or of a hook is code like any other: it is recorded, and checked against the layouts of the gradients that it
receives. On a rank, a gradient may be a part (of features, heads or a sequence), or a term of a sum. A part can't be
divided by the norm of the whole, nor by a size; a term of a sum can only be added and scaled, not clamped. tpplan then
moves the gathers in front of the function, and the slices behind it, if there is a module boundary to put them;
this finding says that there isn't.
""",
        bad="""
class Normalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm(dim=-1, keepdim=True)

def forward(self, x):
    return self.down(torch.relu(Normalized.apply(self.weight @ x)))   # `weight` is `colwise`
""",
        good="""
def forward(self, x):
    return self.down(torch.relu(Normalized.apply(self.up(x))))   # what leaves `up` can be gathered
""",
    ),
    CatalogueEntry(
        code="TP129",
        name="state-between-calls",
        severity=Severity.ERROR,
        summary="What a forward computes depends on Python state that earlier calls left behind.",
        explanation="""
A forward may count its calls, cache a table, or leave tensors in attributes and buffers: that is recorded, and the
calls after the first are proved too. But what it computes must not depend on a number, a string or the length of a list
that each call changes: only the first calls were proved, and the tenth may do something else.
Keep such state in a buffer, and compute with it as a tensor; or count outside of the forward. An iterator that a
forward reads is such state, too. So is the order of a set of modules or tensors, which depends on where they lie in
memory (use a list, a tuple or a dict), and a method of `torch.Tensor` that was replaced.
""",
        bad="""
class Model(nn.Module):
    def forward(self, x):
        self.calls += 1
        return self.warm(x) if self.calls < 1000 else self.cold(x)
""",
        good="""
class Model(nn.Module):
    def forward(self, x, warm=True):
        return self.warm(x) if warm else self.cold(x)
""",
    ),
    CatalogueEntry(
        code="TP130",
        name="changed-model",
        severity=Severity.ERROR,
        summary="A module or parameter of a sharded model was replaced after `parallelize`.",
        explanation="""
What would run is no longer what was proved: a module or a parameter was added, removed or replaced after `parallelize`,
as adapter libraries do, or an attribute was set that counts what a rank has (a number of heads), or to something that
nobody can compare (an iterator). Change the stock model first, and parallelize the result. Flags, settings and
functions that modules hold may be set at any time; calls are then proved again, or run by the proofs of that state.
Wrappers without parameters, such as activation checkpoints, may be added as well.
""",
        bad="""
model = tpplan.parallelize(model, plan)
model = peft.get_peft_model(model, adapter)
""",
        good="""
model = peft.get_peft_model(model, adapter)
model = tpplan.parallelize(model, plan)
""",
    ),
    CatalogueEntry(
        code="TP131",
        name="departed-call",
        severity=Severity.ERROR,
        summary="A call took a path through the model's code that wasn't proved.",
        explanation="""
A proof runs once, on meta tensors, at the sizes of the example. The first real call of each kind, and of
each new combination of sizes, is watched: the torch functions that the model's code calls have to be those of the
proof. A call that takes another path (a branch on a size, on a tensor's value, on a global or an environment
variable) is proved again, and runs by a program of its own if it needs one. This finding says that there is none, or
that nothing the proof can see explains the path. It is raised on every rank, before a result leaves the model. Under
`TPPLAN_DEBUG=1`, read when `parallelize` is called, every call is watched. It is also raised for a call that reads more
entries from the end of a split sequence (`h[:, -n:]`) than its proof, where n follows from a size; and, by name, for a
`TorchFunctionMode` or `TorchDispatchMode` around a call that doesn't pass each operation on as it is, and for a hook of
all modules that begins to change something after the first calls. Modes and hooks that only look are welcome.
""",
        bad="""
def forward(self, x):
    if os.environ.get("FAST"):   # set between two calls
        return self.fast(x)
    return self.exact(x)
""",
        good="""
def forward(self, x):
    return self.fast(x) if self.is_fast else self.exact(x)   # an attribute, set from outside
""",
    ),
    CatalogueEntry(
        code="TP132",
        name="uneven-heads",
        severity=Severity.NOTE,
        summary="Some ranks have more attention heads than others.",
        explanation="""
Heads that the axis doesn't divide are split all the same: each rank has whole query heads, and the key and value heads
that these use, as many queries of each; a key head whose queries are on several ranks is stored on each of these. No
rank has more queries than need be, but the fullest has more than the mean, and the others wait for it in each
attention. The note tells by how much, and which numbers of ranks share the heads out evenly.
""",
    ),
    CatalogueEntry(
        code="TP136",
        name="cannot-run",
        severity=Severity.ERROR,
        summary="The model's own code can't run on one rank's shards.",
        explanation="""
Each program is rehearsed before anything changes: the lowered model runs once on meta tensors, forward and backward,
with parameters as they are read at run time. Code that looks up the model's parameters itself, such as
`dict(self.named_parameters())` inside a forward, gets DTensors, which can't be mixed with plain tensors. A rank's part
of a whole tensor may lie in memory with gaps, which `.view` doesn't take where `.reshape` does.
""",
        bad="""
def forward(self, x):
    return functional.linear(x, dict(self.named_parameters())["up.weight"])
""",
        good="""
def forward(self, x):
    return self.up(x)
""",
    ),
    CatalogueEntry(
        code="TP137",
        name="bounded-search",
        severity=Severity.NOTE,
        summary="A module has more ways to lay out its values than the compiler follows.",
        explanation="""
The compiler looks for the cheapest layouts of all values of a body at once. Where many values wait for each other, it
follows those ways on which values that will be joined lie alike, and of these the cheapest. The program is checked as
any other, and right; but one of the ways that weren't followed could send less. The note says how many there were, in
the round of the search that led to the program. A pin (`input` or `output`) on a module there leaves fewer. If the
compiler reports beside it that no layouts suit a body, one of the other ways might have: pin what you want there.
""",
    ),
    CatalogueEntry(
        code="TP138",
        name="second-derivative",
        severity=Severity.ERROR,
        summary="The backward of a sharded model would have to be differentiated again.",
        explanation="""
A gradient that a forward computes itself, `torch.autograd.grad(energy, positions, create_graph=True)`, is part of the
program: it is proved, and so is its derivative. A gradient of the whole model that is taken afterwards isn't, since the
backwards of the collectives can't be differentiated. Rather than drop terms, the backward raises.
""",
        bad="""
loss = model(x).sum()
(gradient,) = torch.autograd.grad(loss, x, create_graph=True)
""",
        good="""
class Penalized(nn.Module):
    def forward(self, x):
        loss = self.model(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.pow(2).sum()
""",
    ),
    CatalogueEntry(
        code="TP140",
        name="parts-of-a-parameter",
        severity=Severity.ERROR,
        summary="Something was done to a sharded parameter that can't be done to it, or to one that it has replaced.",
        explanation="""
Outside of a forward, parameters, their gradients and their optimizer's states are the whole tensors: what counts for
each element by itself, norms and sums run on each rank's part, all else on the whole, which is gathered, and cut again
where it was written to. Views write through. What is left is refused: a parameter keeps its shape. Lists, dicts,
attributes, closures and optimizers that held a parameter before `parallelize` hold the sharded one afterwards; a local
variable holds the old one, which raises, since what is done to it would be lost, and so does a backward through a call
from before. Where somebody has a view of a parameter, or a weak container with it, `parallelize` itself is refused.
As a warning: an operation gathers the whole of a parameter in each step.
""",
        bad="""
weight = model.up.weight
model = tpplan.parallelize(model, "plan.yaml")
weight.data.mul_(2)
""",
        good="""
model = tpplan.parallelize(model, "plan.yaml")
model.up.weight.data.mul_(2)
""",
    ),
    CatalogueEntry(
        code="TP142",
        name="pickled-model",
        severity=Severity.ERROR,
        summary="A sharded module was to be pickled.",
        explanation="""
A sharded module belongs to one process: it holds that rank's parts and its connections to the other ranks, which
mean nothing elsewhere. `torch.save(model)`, `pickle.dumps(model)` and passing a model to another process are therefore
refused. Its state can be saved, and loaded into a model that is parallelized where it is needed; `copy.deepcopy` works.
""",
        bad="""
torch.save(model, "model.pt")
""",
        good="""
tpplan.save_weights(model, "folder")
""",
    ),
    CatalogueEntry(
        code="TP143",
        name="unknown-initialization",
        severity=Severity.ERROR,
        summary="It isn't known how the stock model initialises some of its modules, or that can't be recorded.",
        explanation="""
`tpplan.init_weights` makes the numbers that the stock model's constructor makes from the same seed. For that it runs
the constructor once more, without memory, and records it. A model of transformers is built of its config. Of another
model the constructor's arguments aren't known. Where all modules are torch's own, and the classes around them only put
them together, each is reset in its turn, which is the same; the notes say for which modules that doesn't hold, and
why. `build=` then says how the stock model is made. As a warning: tensors that the stock model itself never writes to,
and which hold whatever was in its memory.
""",
        bad="""
model = parallelize(Model(layers=12), plan)     # Model's __init__ calls nn.init.normal_ on its own parameters
tpplan.init_weights(model)
""",
        good="""
tpplan.init_weights(model, build=lambda: Model(layers=12))
""",
    ),
    CatalogueEntry(
        code="TP144",
        name="other-stock-model",
        severity=Severity.ERROR,
        summary="The stock model, built anew to initialise a sharded one, isn't the model that was sharded.",
        explanation="""
`tpplan.init_weights` matches the stock model that it builds with the sharded model by the names of parameters and
buffers, their shapes, dtypes and ties; the notes list where they differ. The sharded model was built with other
arguments or another default dtype, or changed after it was built (a head was replaced, a parameter cast). `build` has
to return what was passed to `parallelize`.
""",
        bad="""
tpplan.init_weights(model, build=lambda: Model(layers=12))     # the model has 24 layers
""",
        good="""
tpplan.init_weights(model, build=lambda: Model(layers=24))
""",
    ),
    CatalogueEntry(
        code="TP145",
        name="ranks-initialize-apart",
        severity=Severity.ERROR,
        summary="The ranks would draw different numbers for one model.",
        explanation="""
Every rank draws all of the stock model's random numbers and keeps its part of them. So all ranks must start from the
same state of torch's generator, and build the same stock model. No rank's model has changed.
""",
        bad="""
torch.manual_seed(rank)
tpplan.init_weights(model)
""",
        good="""
torch.manual_seed(0)
tpplan.init_weights(model)
torch.manual_seed(rank)
""",
    ),
    CatalogueEntry(
        code="TP160",
        name="unreached-model",
        severity=Severity.ERROR,
        summary="The plan is for a model inside of the one that was passed, which doesn't pass its calls on.",
        explanation="""
A model may only wrap the one that a plan was written for, as peft's `PeftModel` does. The names in the plan are then
read inside of it, the inner model is what is sharded, and the wrapper runs around it on whole tensors. For that, an
example call of the wrapper is followed to the inner model. Either it didn't get there, or the wrapper passes a cache of
keys and values that it makes itself (prefix tuning), of which each rank would need its part.
""",
        bad="""
model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8))
tpplan.parallelize(model, "plans/llama.yaml")
""",
        good="""
model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
tpplan.parallelize(model, "plans/llama.yaml")
""",
    ),
    CatalogueEntry(
        code="TP170",
        name="data-parallel-ranks",
        severity=Severity.ERROR,
        summary="Data parallelism was to work over ranks that hold different parts of the model.",
        explanation="""
`DistributedDataParallel`, `replicate` and `fully_shard` take the ranks that they are given for replicas of one another.
The ranks of the plan's axis are no replicas: each has its own part of every sharded parameter, and averaging or cutting
these together would mix them up. Make a mesh with an axis for each, pass `mesh["tp"]` to `parallelize`, and
`mesh["dp"]` to torch. Without a mesh or group, torch takes all processes.
""",
        bad="""
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
model = DistributedDataParallel(tpplan.parallelize(model, plan, mesh["tp"]))
""",
        good="""
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
model = DistributedDataParallel(tpplan.parallelize(model, plan, mesh["tp"]), device_mesh=mesh["dp"])
""",
    ),
    CatalogueEntry(
        code="TP171",
        name="cut-parameter",
        severity=Severity.ERROR,
        summary="A module was called while `fully_shard` held its parameters cut.",
        explanation="""
`fully_shard` puts parameters together in hooks around the forward of the module that it was called for. A module inside
that is called by itself, or by another method than the forward, has parameters of which each rank holds a piece of its
part, and would compute with that. Call the module that was given to `fully_shard`, register the method, or unshard.
""",
        bad="""
fully_shard(model, mesh=mesh["dp"])
vectors = model.embed(ids)
""",
        good="""
fully_shard(model, mesh=mesh["dp"])
register_fsdp_forward_method(model, "encode")     # a method of the model that calls `self.embed`
vectors = model.encode(ids)
""",
    ),
    CatalogueEntry(
        code="TP172",
        name="data-parallel-option",
        severity=Severity.ERROR,
        summary="An option of torch's data parallelism can't be had with a sharded model.",
        explanation="""
Around a sharded model, `DistributedDataParallel` averages gradients by tpplan's own buckets, since torch's can't take
DTensors. Everything that is done to torch's buckets is left out: communication hooks, `mixed_precision`, `join`, and
parameters with a delayed sum. In torch, `fully_shard` refuses to keep DTensors cut over a smaller number of ranks after
the forward, and needs meshes with names. The message says what to do instead.
""",
        bad="""
model = DistributedDataParallel(model, device_mesh=mesh["dp"])
model.register_comm_hook(None, bf16_compress_hook)
""",
        good="""
fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
""",
    ),
    CatalogueEntry(
        code="TP173",
        name="late-gradient",
        severity=Severity.ERROR,
        summary="A gradient arrived once more after its average over the data-parallel ranks had begun.",
        explanation="""
`DistributedDataParallel` sends a parameter's gradient as soon as it has arrived, which is once in each backward. With
`checkpoint(…, use_reentrant=True)` each checkpoint has a backward of its own, so a parameter that is used in several of
them, or in one and outside, gets its gradient in pieces. With `use_reentrant=False` it gets it at once.
""",
        bad="""
y = checkpoint(model.block, checkpoint(model.block, x, use_reentrant=True), use_reentrant=True)
""",
        good="""
y = checkpoint(model.block, checkpoint(model.block, x, use_reentrant=False), use_reentrant=False)
""",
    ),
    CatalogueEntry(
        code="TP180",
        name="compiled-around",
        severity=Severity.ERROR,
        summary="A function around a sharded model is to be one graph.",
        explanation="""
At the start of each call tpplan holds the call against what was proved, and reads the parameters such that their
gradients arrive in the right layout. Neither can be part of a graph. `torch.compile` of the model, or of a module
inside, has one graph of everything else. A function that calls the model has a graph before and one after it, so that
`fullgraph=True` doesn't hold for it.
""",
        bad="""
@torch.compile(fullgraph=True)
def step(ids):
    return model(ids).logits.sum()
""",
        good="""
model.compile(fullgraph=True)

def step(ids):
    return model(ids).logits.sum()
""",
    ),
    CatalogueEntry(
        code="TP181",
        name="compiled-random",
        severity=Severity.ERROR,
        summary="A body whose random numbers differ between ranks is to be part of a graph.",
        explanation="""
Dropout on split activations draws other numbers on each rank, for which a generator is seeded and put back. That
can't be part of a graph: without `fullgraph=True` the graph ends before such a module and goes on after it. In
evaluation, or with a dropout probability of 0, nothing is drawn.
""",
        bad="""
model.train()                                 # attention_dropout is 0.1
model.compile(fullgraph=True)
""",
        good="""
model.train()
model.compile()
""",
    ),
    CatalogueEntry(
        code="TP182",
        name="compiled-around-fsdp",
        severity=Severity.ERROR,
        summary="FSDP gathers parameters inside of what is compiled.",
        explanation="""
FSDP gathers the parameters of a module just before it runs. A compiled body reads all of its parameters at its start,
when FSDP has gathered those of its own module only. So compile the modules that `fully_shard` was called on, each by
itself.
""",
        bad="""
for layer in model.layers:
    fully_shard(layer, mesh=mesh["dp"])
model.compile()
""",
        good="""
for layer in model.layers:
    layer.compile()
    fully_shard(layer, mesh=mesh["dp"])
""",
    ),
    CatalogueEntry(
        code="TP183",
        name="compiled-watched",
        severity=Severity.WARNING,
        summary="Calls of a compiled model run without the compiler, since their path is watched.",
        explanation="""
The path that a call takes through the model's code is watched at the first call of its kind and sizes. Under
`TPPLAN_DEBUG=1`, and where a branch on a tensor's value needs another program on either side, every call is. Python
has to run for that, so nothing is compiled; results are right.
""",
        bad="""
TPPLAN_DEBUG=1 torchrun --nproc-per-node=2 train.py    # which calls model.compile()
""",
        good="""
torchrun --nproc-per-node=2 train.py
""",
    ),
    CatalogueEntry(
        code="TP184",
        name="compiled-record",
        severity=Severity.ERROR,
        summary="A body that runs from its record is to be part of a graph.",
        explanation="""
A body whose sizes can't be made local runs from a record of its operations (TP124), by a loop in Python that isn't
compiled. Nor are experts to which tokens go all-to-all: how many rows are sent is in the call's numbers. Without
`fullgraph=True` the graph ends before such a module and goes on after it.
""",
        bad="""
model.compile(fullgraph=True)
""",
        good="""
model.compile()
""",
    ),
    CatalogueEntry(
        code="TP185",
        name="compiled-class-call",
        severity=Severity.ERROR,
        summary="A body that calls a loss over split classes is to be part of a graph.",
        explanation="""
A body that calls a loss over logits that are split by classes runs in Python, where that call is replaced by one over
the ranks; the modules that it calls are compiled, each by itself. Where the model, or the module that is compiled, has
that body, nothing need be done. Deeper inside, the graph ends before such a module and goes on after it, which
`fullgraph=True` forbids.
""",
        bad="""
model.compile(fullgraph=True)        # a wrapper around the model whose forward computes the loss
""",
        good="""
model.inner.compile(fullgraph=True)  # the module whose forward computes the loss
""",
    ),
    CatalogueEntry(
        code="TP186",
        name="steering-numbers",
        severity=Severity.WARNING,
        summary="Many calls were proved anew, since the model's Python reads other numbers of their inputs.",
        explanation="""
A model may read sizes of pictures, or how many tokens they take, with `.tolist()` or `.item()`. Calls in which it reads
the same run by the same proof; others are proved when they come, which takes some seconds each. Results are right.
Batches whose pictures have the same sizes, and stand in the same places, are proved once.
""",
        bad="""
for batch in batches:                               # pictures of any size, anywhere in a text
    model(**batch)
""",
        good="""
processor(images=images, text=text, max_pixels=512 * 512, min_pixels=512 * 512, padding="max_length")
""",
    ),
    CatalogueEntry(
        code="TP190",
        name="loop-unaware",
        severity=Severity.ERROR,
        summary="A training loop takes ranks that share a model for ranks with a model each.",
        explanation="""
accelerate gives each rank batches of its own and averages their gradients, unless it is told by `tp_size` that ranks
share a model. It must see all processes, and ranks that share a model must be numbered one after the other. The Trainer
of transformers is told by the model. `Accelerator.prepare` and the Trainer say so before a batch is drawn. On processes
without a GPU accelerate takes such a config after `tpplan.follow_training_loops()`.
""",
        bad="""
accelerator = Accelerator()
model = accelerator.prepare(tpplan.parallelize(model, plan))
""",
        good="""
accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
model = accelerator.prepare(tpplan.parallelize(model, plan))
""",
    ),
    CatalogueEntry(
        code="TP191",
        name="loop-option",
        severity=Severity.ERROR,
        summary="A training loop was asked for something that a sharded model can't have.",
        explanation="""
An option of accelerate or of transformers' TrainingArguments would shard the model again (`fsdp`, DeepSpeed), or give
ranks that share a model different batches, or replicas of it the same ones, or step by an optimizer that can't take
DTensors. The message names the option, and what to use in its place. Gradients are averaged over replicas without any
option; FSDP may be put around the model before.
""",
        bad="""
Trainer(tpplan.parallelize(model, plan, mesh["tp"]), TrainingArguments(fsdp="full_shard"))
""",
        good="""
model = tpplan.parallelize(model, plan, mesh["tp"])
Trainer(fully_shard(model, mesh=mesh["dp"]), TrainingArguments())
""",
    ),
    CatalogueEntry(
        code="TP192",
        name="different-inputs",
        severity=Severity.ERROR,
        summary="Ranks that share a model were called with different arguments.",
        explanation="""
Each rank computes its part of one result, so all ranks of the axis must be called with the same tensors and flags, in
the same mode. Before the first call of each kind the ranks compare digests of what they were called with, and under
`TPPLAN_DEBUG=1` before every call; the message names the first argument that differs. Usual causes: a
DistributedSampler over all processes rather than over the data-parallel axis, an unseeded shuffle, masks drawn from a
generator that is seeded by rank. Other calls aren't compared.
""",
        bad="""
sampler = DistributedSampler(data)                                    # a part for each process
""",
        good="""
dp = mesh["dp"]
sampler = DistributedSampler(data, dp.size(), dp.get_local_rank())    # a part for each replica
""",
    ),
    CatalogueEntry(
        code="TP193",
        name="optimizer-state",
        severity=Severity.ERROR,
        summary="An optimizer's state doesn't fit the sharded model's parameters.",
        explanation="""
Under accelerate and transformers' Trainer an optimizer's state is saved and loaded whole, as the unsharded model's, and
each rank takes its part. A tensor in it has another shape than the parameter: the state is that of another model, or
was saved by each rank for its part.
""",
        bad="""
torch.save(optimizer.optimizer.state_dict(), f"rank{rank}.pt")
""",
        good="""
accelerator.save_state("folder")
""",
    ),
    CatalogueEntry(
        code="TP199",
        name="internal-error",
        severity=Severity.ERROR,
        summary="A bug in tpplan.",
        explanation="""
tpplan reached a state that should be impossible. Neither the plan nor the model is at fault: please report it, with
the output of `--traceback` (or with `TPPLAN_TRACEBACK=1` set). The command exits with 2.
""",
    ),
)
