"""Numbers in the lines that public training scripts print."""

import math

import pytest

from rearview.source.numbers_in_output import PrintedNumbers, numbers_in

LINES = {
    # plain scripts
    "epoch 3 loss 0.12": {"loss": 0.12},
    "loss=0.12": {"loss": 0.12},
    "Loss: 0.12 | Acc: 93.1%": {"loss": 0.12, "acc": 93.1},
    "Epoch 1/5, Loss: 1.5e-3, LR: 0.001": {"loss": 0.0015, "lr": 0.001},
    "Epoch [1/5], Step [100/600], Loss: 0.3012": {"loss": 0.3012},
    "epoch: 10, train_loss: 0.1, val_loss: 0.2, val_acc: 0.93": {
        "train_loss": 0.1,
        "val_loss": 0.2,
        "val_acc": 0.93,
    },
    "[1,  2000] loss: 2.173": {"loss": 2.173},
    "Accuracy of the network on the 10000 test images: 97.5 %": {"accuracy": 97.5},
    "train Loss: 0.2481 Acc: 0.9016": {"train_loss": 0.2481, "train_acc": 0.9016},
    "val Loss: 0.2012 Acc: 0.9281": {"val_loss": 0.2012, "val_acc": 0.9281},
    "Validation - loss 0.5, accuracy 81.2%": {"val_loss": 0.5, "val_accuracy": 81.2},
    "step=120 lr=3e-04 grad_norm=1.25": {"lr": 3e-4, "grad_norm": 1.25},
    "best acc: 0.91": {"best_acc": 0.91},
    "Number of parameters: 1,199,882": {"number_of_parameters": 1199882},
    "final score = -3": {"final_score": -3},
    # pytorch/examples: mnist, imagenet
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.300039": {"train_loss": 2.300039},
    "Test set: Average loss: 0.0500, Accuracy: 9850/10000 (98%)": {
        "test_average_loss": 0.05,
        "test_accuracy": 98,
    },
    "Epoch: [0][  10/5005]\tTime  0.541 ( 1.250)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.39 (  0.12)": {
        "time": 0.541,
        "loss": 6.9,
        "acc@1": 0.39,
    },
    " *   Acc@1 70.200 Acc@5 89.300": {"acc@1": 70.2, "acc@5": 89.3},
    # nanoGPT, minGPT
    "step 250: train loss 2.0976, val loss 2.1236": {"train_loss": 2.0976, "val_loss": 2.1236},
    "iter 10: loss 3.2423, time 1234.56ms, mfu 12.34%": {
        "loss": 3.2423,
        "time": 1234.56,
        "mfu": 12.34,
    },
    "iter_dt 0.00ms; iter 100: train loss 0.16245": {"iter_dt": 0.0, "train_loss": 0.16245},
    # Hugging Face Trainer
    "{'loss': 0.4037, 'grad_norm': 2.25, 'learning_rate': 4.5e-05, 'epoch': 0.5}": {
        "loss": 0.4037,
        "grad_norm": 2.25,
        "learning_rate": 4.5e-05,
    },
    "{'train_runtime': 12.3, 'train_samples_per_second': 81.2, 'train_loss': 0.4, 'epoch': 1.0}": {
        "train_runtime": 12.3,
        "train_samples_per_second": 81.2,
        "train_loss": 0.4,
    },
    '{"loss": 0.5, "acc": 0.75}': {"loss": 0.5, "acc": 0.75},
    # Keras
    "469/469 - 3s - 6ms/step - accuracy: 0.9112 - loss: 0.3101 - val_accuracy: 0.95 - val_loss: 0.2": {
        "accuracy": 0.9112,
        "loss": 0.3101,
        "val_accuracy": 0.95,
        "val_loss": 0.2,
    },
    "469/469 ━━━━━━━━━━━━━━━━━━━━ 3s 6ms/step - accuracy: 0.91 - loss: 0.29": {
        "accuracy": 0.91,
        "loss": 0.29,
    },
    "Epoch 1/10": {},
    # XGBoost, LightGBM, scikit-learn, CatBoost
    "[0]\ttrain-rmse:0.51231\teval-rmse:0.61231": {"train_rmse": 0.51231, "eval_rmse": 0.61231},
    "[12]\tvalidation_0-logloss:0.60123": {"validation_0_logloss": 0.60123},
    "[10]\ttraining's l2: 0.21\tvalid_0's l2: 0.24": {"training_l2": 0.21, "valid_0_l2": 0.24},
    "Iteration 1, loss = 2.32109021": {"loss": 2.32109021},
    "Norm: 12.35, NNZs: 64, Bias: -1.000000, T: 1437, Avg. loss: 0.126": {
        "norm": 12.35,
        "nnzs": 64,
        "bias": -1.0,
        "t": 1437,
        "avg_loss": 0.126,
    },
    "0:\tlearn: 0.6931\ttest: 0.69\tbest: 0.69 (0)\ttotal: 48ms\tremaining: 4.8s": {
        "learn": 0.6931,
        "test": 0.69,
        "best": 0.69,
        "total": 48,
        "remaining": 4.8,
    },
    # bars: tqdm and Lightning
    " 50%|█████     | 5/10 [00:00<00:00,  9.90it/s, loss=0.5, acc=0.9]": {"loss": 0.5, "acc": 0.9},
    "Epoch 3: 100%|██████████| 938/938 [00:12<00:00, 76.10it/s, v_num=0, train_loss=0.123]": {
        "train_loss": 0.123
    },
    "100%|██████████| 10/10 [00:01<00:00,  9.52it/s]": {},
    "epoch 1 iter 23: train loss 1.23456. lr 6.0e-4": {"train_loss": 1.23456, "lr": 6e-4},
    # stable-baselines3, detectron2, fairseq
    "|    ep_rew_mean     | 22.4     |": {"ep_rew_mean": 22.4},
    "eta: 0:10:12  iter: 19  total_loss: 1.204  time: 0.35  lr: 0.02  max_mem: 2011M": {
        "total_loss": 1.204,
        "time": 0.35,
        "lr": 0.02,
        "max_mem": 2011,
    },
    "2024-05-01 12:00:01 | INFO | train | epoch 001 | loss 5.21 | ppl 37.1 | lr 0.0005": {
        "train_loss": 5.21,
        "train_ppl": 37.1,
        "train_lr": 0.0005,
    },
    # no results
    "": {},
    "Using 8 GPUs": {},
    "0 0.123 0.45": {},
    "2024-05-01 12:00:01": {},
    "Files already downloaded and verified": {},
    "Saved to runs/exp-3/model_12.pt": {},
    "listening on http://localhost:8080/": {},
    "torch 2.13.0+cpu": {},
    "Epoch 00012: reducing learning rate": {},
    "[00:12<00:03]": {},
    "x" * 10_000: {},
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_a_printed_line_gives_its_named_numbers(line):
    assert numbers_in(line) == LINES[line]


def test_a_printed_nan_is_a_value():
    found = numbers_in("loss: nan acc: inf")
    assert math.isnan(found["loss"])
    assert found["acc"] == math.inf


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [
                "epoch     train_loss  valid_loss  accuracy  time    ",
                "0         0.812       0.431       0.93      00:12   ",
                "1         0.401       0.398       0.94      00:12   ",
            ],
            [
                {"train_loss": 0.812, "valid_loss": 0.431, "accuracy": 0.93},
                {"train_loss": 0.401, "valid_loss": 0.398, "accuracy": 0.94},
            ],
        ),
        (
            [
                "      Iter       Train Loss   Remaining Time ",
                "         1           1.2450            0.05s",
            ],
            [{"train_loss": 1.245, "remaining_time": 0.05}],
        ),
    ],
)
def test_rows_below_the_head_of_a_table_have_its_names(lines, expected):
    table = PrintedNumbers()
    assert [found for line in lines if (found := table.read(line))] == expected


def test_rows_of_another_width_have_no_names():
    table = PrintedNumbers()
    table.read("epoch  loss  time")
    assert table.read("0  0.5") == {}
    assert table.read("just some words") == {}
    assert table.read("0  0.5  00:01") == {}
