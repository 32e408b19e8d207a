"""A Llama with an adapter of peft, trained by Transformers' `Trainer`."""

import tempfile
import warnings

import peft
import torch
from record import note
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

warnings.simplefilter("ignore")


class Notes(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        note(model)


torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
base = LlamaForCausalLM(LlamaConfig(vocab_size=37, max_position_embeddings=16, use_cache=False, **sizes))
model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
words = [{"input_ids": row, "labels": row} for row in torch.randint(37, (16, 8))]
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder, max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.0, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    result = Trainer(model, settings, train_dataset=words, callbacks=[Notes()]).train()
print(result.training_loss, sum(p.double().sum().item() for p in model.parameters()))
