"""What `surefoot --help` and `surefoot VERB --help` print; the settings of a recipe are told by its own flags."""

WHOLE = """surefoot trains PyTorch models without losing its footing.

  surefoot train RECIPE           a ready-made run: gpt, translation, images
  surefoot train FILE.py:build    a run of your own: build() returns a surefoot.Run
  surefoot plan ...               what train would run; trains nothing
  surefoot find-lr ...            try learning rates, and suggest one
  surefoot find-batch ...         measure micro-batch sizes, and recommend one
  surefoot profile RECIPE         where a step's time goes, and what would be quicker
  surefoot resume RUN             go on from the newest intact checkpoint
  surefoot submit ...             train as a job of Slurm that goes on by itself
  surefoot evaluate RUN           score a checkpoint: newest, best, or of a step
  surefoot predict RUN INPUT...   use the trained model on a prompt, line or picture
  surefoot compare RECIPE ...     train variants side by side, one table and one plot
  surefoot diagnose RUN           what is wrong with a run, and what to try
  surefoot report RUN...          a page on a run, or several over each other
  surefoot replay RUN --step N    make a past step again, and look into it
  surefoot verify RUN             check its files, make steps again, compare bits
  surefoot export RUN             write a run's weights as others load them
  surefoot data prepare OUT TEXT  write token shards of text, JSONL or Parquet

RUN is a run's directory, its name under runs/, or latest. --traceback shows
where an error came from. surefoot VERB --help says more. Exit status: 0 done,
2 settings, 3 data, 4 checkpoint, 5 diverged, 6 out of memory, 7 another process
of the run was lost, 8 steps made again came out otherwise (verify), 130 and 143
stopped by a signal, saved; by a second signal at once, and not saved.
"""

VERBS = {
    "train": """surefoot train RECIPE|FILE.py:build [--config FILE] [--preset NAME] [settings]

Train, or go on where --out holds a checkpoint of the same run. Recipes: gpt,
translation, images. Every setting is a flag and a key of a TOML file: surefoot
train gpt --help shows all with their defaults. The later wins: defaults,
--preset, --config, flags. Ctrl-C saves and ends; the same command goes on. In
FILE.py, build() may take one argument, a dataclass whose fields are then
settings.

  --nproc N           train in N processes of this machine; 1:4 is as many as
                      divide a step, and fewer where one has died
  --max-restarts N    start all of them again where one died, N times
  --accept-change X   go on although X computes something else than before:
                      loss, model, collate, data, optimizer, or several: a,b

  surefoot train gpt --data.path my.txt --out runs/mine
  surefoot train gpt --preset gpt2-124m --data.path shards/ --nproc 8
  surefoot train images --preset fashion-mnist --data.path DIR
""",
    "plan": """surefoot plan RECIPE|FILE.py:build [--config FILE] [--preset NAME] [settings]
                                             [--world N]

Show what train would run with the same arguments: settings and where each came
from, parameters, how a batch is cut, learning rates, memory and time measured
with one micro-batch, and whether the loss is the mean that it must be. Trains
nothing and writes nothing.

With --world it is about that many GPUs, and on paper: memory of each, bytes
sent and the time of a step, for the run's --parallel and --sharding and for
others, computed from shapes; nothing is allocated, and recipes read no data.

  --world N             how many GPUs
  --flops NUMBER        a second, of one GPU (default: 989e12 in bf16, an H100's)
  --mfu FRACTION        of these that training uses (default: 0.4)
  --gpu-memory SIZE     of one GPU (default: "80 GB")
  --bandwidth SPEED     a GPU's to other nodes (default: "50 GB/s")
  --node-bandwidth SPEED  to others of its node (default: "450 GB/s")
  --node-size N         GPUs of a node (default: 8)

  surefoot plan gpt --batch-size 64 --micro-batch-size 8
  surefoot plan gpt --preset gpt2-1558m --world 512 --parallel fsdp
""",
    "find-lr": """surefoot find-lr RECIPE|FILE.py:build|RUN [settings] [--from 1e-6] [--to 10]

Try learning rates from the lowest to the highest, each for one step on the data
that training would see next, and suggest the one at which the loss falls
steepest. Settings are those of surefoot train; of a RUN, its newest checkpoint
is where the steps begin. Trains nothing and writes nothing but --out. Leaves
with 1 where no rate can be suggested.

  --from RATE        the lowest rate (default: 1e-6)
  --to RATE          the highest; ends where the loss diverges (default: 10)
  --steps N          how many rates (default: 100)
  --out DIR          draw the curve: DIR/find-lr.svg and DIR/find-lr.png; not
                     the directory of a run, as --out is elsewhere
  --checkpoint WHICH of a RUN: newest, best, or that of a step

  surefoot find-lr images --optimizer.name sgd --out pictures/
  surefoot find-lr gpt --batch-size 32 --from 1e-5 --to 1 --steps 60
""",
    "find-batch": """surefoot find-batch RECIPE|FILE.py:build|RUN [settings] [--memory 8GB]

Measure memory and throughput of the micro-batch sizes that divide the batch,
and recommend the smallest that is about as fast as the fastest, with the
accumulation that keeps the batch. Trains nothing and writes nothing.

  --target-batch N   divide this batch instead of --batch-size; "4096 tokens"
                     where the run's is in tokens
  --memory SIZE      what may be used, such as 8GB (default: what is free). A
                     tenth of it is left free
  --checkpoint WHICH of a RUN: newest, best, or that of a step

  surefoot find-batch gpt --batch-size 64
  surefoot find-batch images --preset cifar10 --data.path DIR --memory 4GB
""",
    "profile": """surefoot profile RECIPE|FILE.py:build|RUN [settings] [--tries WHAT]

Measure where the time of a step goes, its operators, memory and arithmetic, and
try what may make it quicker, each in turn with the run as it is. Settings are
those of surefoot train. Trains nothing; takes about half a minute.

  --tries WHAT       usual (default), none, all, or some of: workers, precision,
                     fused, checkpointing, channels-last, micro-batch, compile
                     (not usual: compiling takes 20 seconds or more)
  --steps N          steps that are timed, after a warm-up (default: 12)
  --limit SECONDS    about how long all of it may take (default: 20)
  --peak NUMBER      operations a second of this device (default: measured)
  --shapes           tell operators apart by the shapes of their inputs
  --out DIR          profile.json and .txt, trace.json.gz (for ui.perfetto.dev),
                     memory.png and .svg (default: runs/profile)
  --checkpoint WHICH of a RUN: newest, best, or that of a step
  --run-changed-program  run it even if it has changed since, or others could
                         have changed it

  surefoot profile gpt
  surefoot profile images --preset cifar10 --data.path DIR --tries all
  surefoot profile gpt --preset gpt2-124m --data.path shards/ --peak 989e12
""",
    "resume": """surefoot resume RUN [settings]

Go on from the newest intact checkpoint of a run, to the same bits as if it had
never stopped. Settings that change no result may change: --workers,
--log-every, --save-every, --keep-last, --stop-after, --time-limit, --max-restarts,
and --length as far as the schedule allows it exactly. So may --nproc and
--parallel: the same samples in the same order, and equal to rounding.

  --nproc N         go on in N processes of this machine (default: as before)
  --max-restarts N  start all of them again where one died, N times
  --accept-change X go on although X computes something else than before: loss,
                    model, collate, data, optimizer, or several: loss,data

  surefoot resume latest
  surefoot resume runs/mine --time-limit "2 h"
""",
    "submit": """surefoot submit RECIPE|FILE.py:build --hours H [--nodes N] [settings]

Train as a job of Slurm, one process for each GPU, through submitit (extra
slurm). Before its time is over and when it is pre-empted it saves, is requeued,
and goes on to the same bits. Settings are those of surefoot train; --out is on
files that all machines share.

  --hours H            time of the job, each time it starts
  --nodes N            machines (default: 1)
  --gpus-per-node N    GPUs, and as many processes, on each (default: 0)
  --tasks-per-node N   processes on each, where there are no GPUs (default: 1)
  --cpus-per-task N    cores of each process (default: the cluster's)
  --partition NAME     where it is queued (default: the cluster's)
  --sbatch NAME=VALUE  any other option of sbatch; may be given several times
  --requeues N         how often it goes on when its time is over (default: 10)
  --logs DIR           logs and submitit's files, in DIR/JOB (default: slurm)
  --local              on this machine instead, to try it

  surefoot submit gpt --hours 12 --gpus-per-node 8 --out runs/large
  surefoot submit my.py:build --hours 24 --gpus-per-node 4 --sbatch account=lab
""",
    "evaluate": """surefoot evaluate RUN [--checkpoint WHICH] [--on WHAT]... [settings]

Score a checkpoint (newest, best, or that of a step) on everything that its run
scores; changes nothing in the run. "average 5" is the mean of the weights of
the last five. --on SPLIT scores one of the run's splits alone. --on NAME=FILE
(or FILE alone) asks a gpt run all questions of a file: HellaSwag, ARC, PIQA,
OpenBookQA, COPA, WinoGrande or LAMBADA as JSON lines, gzipped or not. It may be
given several times.

  --panels               make what the report shows of the task, with the best
                         checkpoint, and write it into the run
  --run-changed-program  run it even if it has changed since, or others could
                         have changed it

  surefoot evaluate runs/mine --checkpoint best
  surefoot evaluate runs/mine --checkpoint "average 5" --on held-out
  surefoot evaluate runs/mine --on hellaswag=hellaswag_val.jsonl
""",
    "predict": """surefoot predict RUN [INPUT...] [--checkpoint WHICH] [settings]

Let a trained model (newest, best, or that of a step) go on from a text. One
input is continued as you watch; several, or the lines of --file FILE, give one
JSON object a line; - reads one from standard input. How many tokens,
temperature, top-k, top-p, seed: surefoot predict RUN --help. A translator
answers each line of its inputs, of --file, or of standard input by one line.

Of a run of images, inputs are picture files: each is made grey or coloured and
resized as the training data were, and the likeliest classes are told.

  --run-changed-program  run a network of your own even if it has changed since,
                         or others could have changed it

  surefoot predict runs/mine "def " --tokens 100 --temperature 0.7
  surefoot predict runs/mine --file prompts.txt
  surefoot predict runs/translation "July 8, 2055" --beam 5
  surefoot predict runs/images picture.png --top 3
""",
    "compare": """surefoot compare RECIPE|FILE.py:build --vary SETTING=A,B... [settings]
surefoot compare DIR                 go on with a comparison
surefoot compare RUN RUN...          compare runs that are there
surefoot compare --schedules LIST    draw schedules side by side; trains nothing

Train every combination of the varied settings on the same samples in the same
order, each as a run of its own below --out; then one table and one plot, with
what is inside the noise said. Stopped or killed, the same command goes on:
what is finished is not trained again. A test split is never scored by it.

  --vary SETTING=A,B    values of a setting; several make a grid
  --variant "S=A T=B"   one combination more; may be given several times
  --seeds N             train each N times, with N seeds from --seed on
  --jobs N              so many at once (default: 1)
  --threads N           of each run (default: cores / jobs); kept in compare.toml
  --target X            tell how soon each reaches this score
  --reference NAME      what differences are taken to: best, first or a variant
  --score "min S/LOSS"  judge by this instead of the score the runs watch
  --out DIR             where to (default: runs/compare; of runs that are there:
                        runs/compared, written anew each time)
  --paired              of runs that are there: score them again, batch by batch
  --search N            search with N trials in ranges: --vary optimizer.lr=1e-4..1e-2
  --sampler, --pruner   of a search: tpe or random; median, halving or none

  surefoot compare gpt --vary optimizer.name=adamw,sgd --vary optimizer.lr=1e-3,3e-3
  surefoot compare images --search 20 --vary optimizer.lr=1e-4..1e-2 --jobs 2
  surefoot compare runs/a runs/b --paired

With --schedules:
Draw learning-rate schedules side by side, into PATH.png and PATH.svg (default:
schedules): each with its peak, its lowest rate, the end of its warm-up and the
mean of its factors, which are printed too. Of a run of 1,000 steps, or of one
of --length; of a recipe with that recipe's length, base rate and the settings
of its schedule. Trains nothing.

LIST has commas between schedules, a colon before each setting, a slash between
drops, and + and @ where one follows on another; all is every shape.

  surefoot compare --schedules cosine,linear,wsd,inverse-sqrt
  surefoot compare --schedules linear:floor=0.1,wsd:cooldown=30% gpt
  surefoot compare --schedules step:drops=30%/60%,constant+linear@50%
  surefoot compare --schedules all gpt --preset shakespeare --out rates
""",
    "diagnose": """surefoot diagnose RUN [--all] [--json] [--strict]

Say what a run's records show to be wrong, or worth knowing: what was found, the
numbers and steps that show it, likely causes, and what to try, with the value
of now. The run may be finished, dead, or training now; it is not changed.
Errors come first: the run is broken or of no use. Warnings cost quality or
time. Notes are worth knowing, and nothing need be wrong. Where nothing is found
it says what was looked at.

  --all      tell too what was found well, and what too little is recorded of
  --json     one JSON object: run, steps, findings, well, unclear
  --strict   leave with 1 where an error is found (default: 0 with any finding)

  surefoot diagnose latest
  surefoot diagnose runs/mine --all
""",
    "report": """surefoot report RUN... [--out FILE] [--png] [--watch [--port N]]

Write one page on a run: how it went in a sentence, what is wrong with it, loss
and scores, rate, norms, speed, memory and time, layers, what the model does,
settings, and the commands to make it again. One file of HTML of at most a
megabyte that needs no network; every run leaves one in its directory when it
ends (--report False to leave it out). The run may be finished, running or dead.
Several runs: their curves over each other, and the settings that differ.

  --out FILE   where to (default: RUN/report.html; of several: report.html)
  --png        the main curves as a picture too, .png and .svg beside the page
  --watch      serve the page on this machine, made anew while the run goes on
  --port N     of --watch (default: one that is free)

Nothing of the run's program is executed. What the model does is shown if the
run has left it; for one that was killed: surefoot evaluate RUN --panels.

  surefoot report latest
  surefoot report runs/a runs/b --out compared.html
  surefoot report runs/mine --watch
""",
    "replay": """surefoot replay RUN --step N [--samples K] [--json] [settings]
surefoot replay RUN --bisect-nan

Make step N (from 0) of a run again, from the nearest checkpoint before it, and
show it: its samples with the loss of each, what every module put out, the
gradient of every parameter, and what was first not finite, in which module and
from which sample. On the same machine it is that step bit for bit, and where
the records hold its loss, that is checked. Only reads the run's directory. It
says first how many steps have to be made again, and about how long that takes.

  --step N      the step, from 0
  --bisect-nan  find the first bad step instead, and show it
  --samples K   how many samples are shown (default: 8); 0 passes none alone
  --json        everything as JSON
  --run-changed-program  run it even if it has changed since, or others could
                         have changed it

  surefoot replay runs/mine --step 412
  surefoot replay latest --bisect-nan
""",
    "verify": """surefoot verify RUN [--steps N] [--windows K] [--all] [--json] [settings]

Prove a run: every byte of its checkpoints and its records against their hashes,
records against each other and the schedule, data against their fingerprints;
then make steps again from checkpoints and compare losses, norms and tensors:
bit for bit on the machine that made them, to rounding elsewhere. Says first
what that costs; writes nothing; a run that goes on may be verified. Of a run
that a script has made only files are checked; in it: surefoot.load(run).verify().

  --all          make all steps again (default: where that takes two minutes)
  --steps N      of a window, from a checkpoint on (default: 100)
  --windows K    the first, the last, and evenly between (default: 5); 0: files
  --seed S       draw the windows instead
  --tolerance X  relative, on another machine (default: 0.01)
  --json         the verdict for programs
  --run-changed-program  run it even if it has changed since, or others could
                         have changed it

Leaves with 0 where nothing is wrong, 4 where files are damaged or contradict
each other, 3 where data are others, 8 where steps come out otherwise.

  surefoot verify latest
  surefoot verify runs/mine --steps 200 --windows 3
""",
    "export": """surefoot export RUN [--checkpoint WHICH] [--out DIR] [--layout LAYOUT]

Write the weights of a checkpoint (newest, best, or that of a step) as
safetensors that others load, checked first, never more than one tensor in
memory. A run that was made by several ranks becomes whole. Averaged weights are
taken where the run has them. Tokenizers of the run are copied along.

  --out DIR        where to (default: export/ in the run's directory)
  --weights KIND   averaged or trained (default: auto, averaged where there are)
  --layout LAYOUT  own: the model's names. gpt2: named and turned as
                   transformers' GPT2LMHeadModel loads them, with config.json;
                   for runs of gpt with --model.family gpt2
  --max-file SIZE  more than this is several files and an index (default: 5 GB)
  --model NAME     of a run of several models, which

  surefoot export runs/mine
  surefoot export runs/mine --checkpoint best --layout gpt2 --out mine
""",
    "data": """surefoot data prepare OUT INPUT... --tokenizer NAME [settings]

Write the tokens of text files and JSON lines (.jsonl), gzipped or not, and of
Parquet, and of directories of them, as shards for --data.path. NAME is gpt2,
bytes, or a tokenizer's file or directory, such as a run's. A text file is one
document, a line of JSON or a row of Parquet one each; an end token follows
each. Stopped or killed, the same command goes on, to the same bytes; run once
more, it checks them. Inputs that have changed since are refused.

  --column NAME       where JSON lines and Parquet have the text (default: text)
  --processes N       how many encode (default: one for each core)
  --shard-tokens N    tokens of a shard (default: 100000000)

  surefoot data prepare shards/ fineweb/*.parquet --tokenizer gpt2
  surefoot train gpt --preset gpt2-124m --data.path shards/
""",
}
