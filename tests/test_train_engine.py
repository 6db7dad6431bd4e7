"""train/engine.py and train/evaluate.py: one step, in every precision, with accumulation, clipping and averaging."""

import math

import pytest
import torch
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from train_helpers import settings

from axial_rope import grid_positions
from models.rope_vit import rope_vit
from train.assemble import make_scheduler, make_task, make_trainer
from train.data import digits, eval_loader
from train.engine import Precision, Trainer, seed_epoch
from train.errors import Stopped
from train.evaluate import evaluate, positions_by, sweep

CPU = torch.device("cpu")


def vit(rope="mixed", seed=0):
    torch.manual_seed(seed)
    return rope_vit("N/2", rope, num_classes=10, image_size=8, channels=1)


def trainer(precision=None, scaler=None, opt="momentum", lr=0.1, **changes):
    """A trainer with a constant learning rate, and plain SGD unless asked otherwise: updates show their gradients."""
    task = ClassificationTask(vit(), verbose=False)
    options = {"momentum": 0.0} if opt == "momentum" else {}
    optimizer = create_optimizer_v2(task.trainable_module, opt, lr=lr, **options)
    scheduler = make_scheduler(settings(sched="constant", epochs=100, warmup_epochs=0), optimizer, 10)
    precision = precision or Precision("cpu")
    return Trainer(task, optimizer, scheduler, precision, scaler or precision.scaler(), **changes)


def batch(count=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator)


def weights(made):
    return torch.cat([parameter.detach().flatten() for parameter in made.task.trainable_module.parameters()])


def overflow(made):
    """Let the next backward pass end in infinite gradients, with a finite loss."""
    handle = made.task.trainable_module.head.weight.register_hook(lambda gradient: gradient * math.inf)
    made.update([batch()])
    handle.remove()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_every_precision_learns_without_nan(dtype):
    """N1: 50 steps on one batch."""
    made = trainer(Precision("cpu", dtype), opt="adamw", lr=2e-3, clip_grad=1.0)
    losses = [made.update([batch()]) for _ in range(50)]
    assert losses[0] > 2 and losses[-1] < 0.3, losses[-1]
    assert (made.updates, made.skipped) == (50, 0)
    assert weights(made).dtype == torch.float32 and weights(made).isfinite().all()


def test_autocast_computes_in_its_dtype_and_none_in_float32():
    for dtype in (None, torch.bfloat16, torch.float16):
        with Precision("cpu", dtype).autocast():
            assert vit()(batch()[0]).dtype == (dtype or torch.float32)


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_takes_bfloat16_only_where_it_is_native(monkeypatch, capability, expected):
    """B6: emulated bfloat16 is slow and large."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Precision.choose("auto", torch.device("cuda")).dtype is expected
    assert Precision.choose("auto", CPU).dtype is None
    assert Precision.choose("bf16", CPU).dtype is torch.bfloat16


def test_only_float16_scales_the_loss():
    enabled = {amp: Precision.choose(amp, CPU).scaler().is_enabled() for amp in ("none", "bf16", "fp16")}
    assert enabled == {"none": False, "bf16": False, "fp16": True}


def test_gradients_are_clipped_after_they_are_unscaled():
    """N2: the gradients are 65536 times larger in the scaled run, the clipped update must be the same."""
    plain, scaled = trainer(clip_grad=0.1), trainer(scaler=torch.amp.GradScaler("cpu", init_scale=65536.0), clip_grad=0.1)
    before = weights(plain)
    for made in (plain, scaled):
        made.update([batch()])
    assert (weights(plain) - before).norm().item() == pytest.approx(0.1 * 0.1, rel=1e-4)  # lr * clip_grad
    torch.testing.assert_close(weights(scaled) - before, weights(plain) - before, rtol=1e-3, atol=1e-8)


def test_an_overflow_is_skipped_counted_and_halves_the_scale():
    """N3: a skipped step leaves the weights alone and the next one works."""
    made = trainer(Precision("cpu", torch.float16))
    before, scale = weights(made), made.scaler.get_scale()
    overflow(made)
    assert weights(made).equal(before)
    assert (made.updates, made.skipped, made.scaler.get_scale()) == (1, 1, scale / 2)
    made.update([batch()])
    assert not weights(made).equal(before)
    assert (made.updates, made.skipped, made.scaler.get_scale()) == (2, 1, scale / 2)


def test_a_loss_that_is_not_finite_stops_before_the_step():
    made = trainer()
    made.update([batch()])
    before = weights(made)
    images, labels = batch()
    images[3, 0, 0, 0] = math.nan
    with pytest.raises(Stopped, match="loss must be finite: step 2 got nan, try a smaller --lr"):
        made.update([(images, labels)])
    assert weights(made).equal(before)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_accumulated_batches_are_one_large_batch(count):
    """N14: clipping included, and the last group of an epoch, which is shorter than the others."""
    parts = [batch(4, seed) for seed in range(count)]
    whole = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    one, many = trainer(clip_grad=0.5), trainer(clip_grad=0.5, accumulate=4)
    seen = []
    loss = many.epoch(parts, seen.append)
    assert one.update([whole]) == pytest.approx(loss, rel=1e-6)
    assert many.updates == len(seen) == 1
    torch.testing.assert_close(weights(many), weights(one), rtol=0, atol=1e-6)


def test_an_epoch_makes_one_step_a_group():
    made, losses = trainer(accumulate=2), []
    mean = made.epoch([batch(4, seed) for seed in range(5)], losses.append)
    assert (made.updates, len(losses)) == (3, 3)
    assert mean == pytest.approx(sum(losses) / 3)


def test_one_group_is_one_optimizer_step():
    made, steps = trainer(accumulate=3), []
    made.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    made.update([batch(4, seed) for seed in range(3)])
    assert len(steps) == 1
    assert all(p.grad is None for p in made.task.parameters())


def test_learning_rate_is_that_of_the_schedule_at_each_update():
    """N6: linear warm-up over 20 updates, then a half cosine to zero at 40, also after a restart."""
    args = settings(sched="cosine", epochs=4, warmup_epochs=2, lr=0.4, opt="sgd", grad_accum_steps=1)
    rates = []
    made = make_trainer(args, make_task(args, vit(), CPU), 10, CPU)
    for _ in range(30):
        made.update([batch(2)])
        rates.append(made.optimizer.param_groups[0]["lr"])
    assert rates[9] == pytest.approx(1e-5 + (0.4 - 1e-5) * 10 / 20)
    assert rates[29] == pytest.approx(0.4 * (1 + math.cos(math.pi * 30 / 40)) / 2)
    again = make_trainer(args, make_task(args, vit(), CPU), 10, CPU)
    again.load_state_dict(made.state_dict())
    assert again.optimizer.param_groups[0]["lr"] == rates[29]
    assert again.updates == 30


def test_averaged_weights_follow_and_are_what_is_evaluated():
    """N12: the evaluation uses the averaged model, under the same autocast."""
    args = settings(model_ema=True, model_ema_decay=0.5, lr=0.5, opt="sgd", clip_grad=None)
    made = make_trainer(args, make_task(args, vit(), CPU), 10, CPU)
    model, average = made.task.trainable_module, made.task.trainable_module_ema.module
    made.update([batch()])
    torch.testing.assert_close(average.head.weight, model.head.weight)  # the first step copies
    before = average.head.weight.clone()
    for _ in range(3):
        made.update([batch()])
    assert not average.head.weight.equal(before)
    assert not average.head.weight.equal(model.head.weight)
    seen = []
    average.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    evaluate(made.task, [batch()], Precision("cpu", torch.float16))
    assert seen == [torch.float16]


def test_evaluation_agrees_between_precisions():
    """N13: float32, autocast and a cast model differ by rounding only."""
    made = trainer()
    images, labels = batch(64)
    exact = evaluate(made.task, [(images, labels)], Precision("cpu"))["loss"]
    mixed = evaluate(made.task, [(images, labels)], Precision("cpu", torch.bfloat16))["loss"]
    made.task.trainable_module.to(torch.bfloat16)
    cast = evaluate(made.task, [(images.bfloat16(), labels)], Precision("cpu"))["loss"]
    assert mixed == pytest.approx(exact, rel=5e-3) and mixed != exact
    assert cast == pytest.approx(exact, rel=1e-2) and cast != exact


@pytest.mark.parametrize("batch_size", [4, 3, 10])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_image_is_counted_once_on_any_number_of_processes(monkeypatch, ranks, batch_size):
    """N7: the samplers of 10 images pad to equal shares; the counts must not see it."""
    images = digits()
    images = type(images)("ten", images.classes, images.train, images.val[:10], images.mean, images.std)
    task = ClassificationTask(vit(), verbose=False)
    counts = torch.zeros(3, dtype=torch.int64)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: tensor)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    create = task.create_evaluator
    made = []
    monkeypatch.setattr(task, "create_evaluator", lambda **options: made.append(create(**options)) or made[-1])
    for rank in range(ranks):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        loader = eval_loader(images, 8, settings(batch_size=batch_size), CPU, distributed=ranks > 1)
        evaluate(task, loader, Precision("cpu"))
        counts += made[-1].counts
    single = evaluate(task, eval_loader(images, 8, settings(), CPU), Precision("cpu"))
    assert counts[0] == 10
    assert 100 * counts[1].item() / 10 == single["top1"]


def test_sweep_uses_both_rules_and_leaves_the_positions_as_they_were():
    task = ClassificationTask(vit("axial"), verbose=False)
    model, asked = task.trainable_module, []

    def loader_of(size):
        asked.append(size)
        return [(torch.randn(4, 1, size, size), torch.arange(4))]

    used = []
    model.register_forward_pre_hook(lambda *_: used.append(model.rope_positions(8, 8)[-1, 0].item()))
    top1 = sweep(task, loader_of, [6, 8], (4, 4), "axial", Precision("cpu"))
    assert asked == [6, 8]
    assert used == [7.0, 3.5] * 2
    assert {rule: list(values) for rule, values in top1.items()} == {"raw": [6, 8], "interpolated": [6, 8]}
    assert model.rope_positions is grid_positions
    assert list(sweep(task, loader_of, [6], (4, 4), "learned", Precision("cpu"))) == ["resampled"]


def test_interpolated_positions_span_the_training_grid():
    model = vit("axial")
    with positions_by(model, "interpolated", (4, 4)):
        assert model.rope_positions(8, 2)[-1].tolist() == [3.5, 2.0]
    with positions_by(model, "raw", (4, 4)):
        assert model.rope_positions(8, 2)[-1].tolist() == [7.0, 1.0]


def test_epochs_processes_and_seeds_draw_differently_and_repeatably():
    def draw(*key):
        seed_epoch(*key)
        return torch.rand(1).item()

    keys = [(0, 1), (0, 2), (1, 1), (1, 0), (0, 1, 1)]
    assert len({draw(*key) for key in keys}) == len(keys)
    assert draw(3, 5, 1) == draw(3, 5, 1)
