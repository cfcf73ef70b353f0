"""LongNet in files: every parameter comes back as it was, or the file is refused."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch

from dilated_attention_pytorch import LongNet, LongNetLM
from dilated_attention_pytorch.models.storage import save_tensors
from tests.longnet import SMALL, close, small, tokens_of, written_out

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def with_dtypes(model, dtypes):
    """Its parameters in these dtypes in turn."""
    for i, parameter in enumerate(model.parameters()):
        parameter.data = parameter.data.to(dtypes[i % len(dtypes)])
    return model


def same(got, want):
    """Parameters by name, dtype and bit."""
    got, want = (dict(model.named_parameters(remove_duplicate=False)) for model in (got, want))
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name].dtype, got[name].requires_grad) == (x.dtype, x.requires_grad)
        assert torch.equal(got[name], x)


class TestFiles:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_saved_and_loaded(self, tmp_path, dtype):
        model, tokens = small().to(dtype), tokens_of(29)
        model.save(tmp_path / "model.safetensors")
        again = LongNetLM.load(tmp_path / "model.safetensors").eval()
        assert again.config == SMALL
        same(again, model)
        assert torch.equal(again(tokens), model(tokens))
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]

    @pytest.mark.parametrize("kind", [LongNet, LongNetLM])
    @pytest.mark.parametrize("num", [2, 3, 4])
    def test_every_parameter_keeps_its_dtype(self, tmp_path, kind, num):
        """All were cast to the dtype of the first: norms in float32 beside matrices in bfloat16 came back rounded."""
        for dtypes in itertools.permutations(DTYPES, num):
            model = with_dtypes(small(kind, num_layers=1), dtypes)
            model.save(tmp_path / "model.safetensors")
            same(kind.load(tmp_path / "model.safetensors"), model)

    @pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.bfloat16, torch.float32)], ids=str)
    def test_tied_weights_stay_tied(self, tmp_path, dtypes):
        model = small()
        model.head.weight = model.embedding.weight
        model.layers[1].attention.in_proj_weight = model.layers[0].attention.in_proj_weight
        with_dtypes(model, dtypes)
        model.save(tmp_path / "model.safetensors")
        again = LongNetLM.load(tmp_path / "model.safetensors").eval()
        same(again, model)
        assert again.head.weight is again.embedding.weight
        assert again.layers[1].attention.in_proj_weight is again.layers[0].attention.in_proj_weight
        assert len(list(again.parameters())) == len(list(model.parameters()))

    def test_what_is_loaded_is_its_own(self, tmp_path):
        """Tensors of a mapped file change when someone writes into it."""
        model, path = small(), tmp_path / "model.safetensors"
        model.save(path)
        again = LongNetLM.load(path)
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(bytes(size))
        same(again, model)

    def test_loading_draws_no_numbers_and_takes_a_device(self, tmp_path):
        model, path = small(), tmp_path / "model.safetensors"
        model.save(path)
        before = torch.get_rng_state()
        assert {x.device.type for x in LongNetLM.load(path, device="meta").parameters()} == {"meta"}
        same(LongNetLM.load(path, device=torch.device("cpu")), model)
        assert torch.equal(torch.get_rng_state(), before)
        with pytest.raises(ValueError, match=r"device must be one that PyTorch knows, .* got 'gpu'"):
            LongNetLM.load(path, device="gpu")

    def test_a_file_that_was_cut_off_is_refused_wherever_it_was_cut(self, tmp_path):
        path = tmp_path / "model.safetensors"
        small(LongNet, num_layers=1).save(path)
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        for size in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:size])
            with pytest.raises(ValueError, match=r"path must be a whole safetensors file, got .*model.safetensors: "):
                LongNet.load(path)

    def test_tensors_that_lack_or_do_not_belong(self, tmp_path):
        """Also one of another shape that could be broadcast."""
        model, path = small(), tmp_path / "model.safetensors"
        about = {"config": dataclasses.asdict(SMALL)}
        for change, message in (
            (lambda x: x.pop("norm.bias"), r'Missing key\(s\) in state_dict: "norm.bias"'),
            (lambda x: x.update(extra=torch.ones(1)), r'Unexpected key\(s\) in state_dict: "extra"'),
            (lambda x: x.update({"norm.bias": torch.ones(1)}), "size mismatch for norm.bias"),
            (lambda x: x.update({"norm.bias": torch.ones(24, 1)}), "size mismatch for norm.bias"),
        ):
            tensors = model.state_dict()
            change(tensors)
            save_tensors(path, tensors, about)
            with pytest.raises(RuntimeError, match=message):
                LongNetLM.load(path)
        save_tensors(path, model.state_dict(), {"step": 3})
        with pytest.raises(ValueError, match=r"path must be a file that LongNetLM.save wrote, got .*model.safetensors"):
            LongNetLM.load(path)

    def test_a_changed_configuration(self, tmp_path):
        model = small(LongNet)
        model.save(tmp_path / "model.safetensors")
        longer = LongNet.load(tmp_path / "model.safetensors", segment_lengths=[100], dilation_rates=[1]).eval()
        x = torch.randn(1, 50, 24, dtype=torch.float64)
        close(longer(x), written_out(longer, x, causal=False))
        with pytest.raises(TypeError, match="width"):
            LongNet.load(tmp_path / "model.safetensors", width=3)
        with pytest.raises(RuntimeError, match="size mismatch"):
            LongNet.load(tmp_path / "model.safetensors", hidden_dim=8)
        with pytest.raises(RuntimeError, match="Missing key"):
            LongNetLM.load(tmp_path / "model.safetensors")

    def test_a_save_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch):
        import safetensors.torch

        path = tmp_path / "model.safetensors"
        model = small()
        model.save(path)
        before = path.read_bytes()

        def half(tensors, target, metadata):
            target.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(safetensors.torch, "save_file", half)
        with pytest.raises(OSError, match="no space left"):
            small().save(path)
        assert path.read_bytes() == before

    def test_a_file_of_someone_else(self, tmp_path):
        import safetensors.torch

        safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match="path must be a file that this package saved"):
            LongNetLM.load(tmp_path / "other.safetensors")

    def test_without_safetensors_a_sentence_says_what_to_install(self):
        code = (
            "import sys; sys.modules['safetensors'] = None\n"
            "from dilated_attention_pytorch import LongNetLM\n"
            "LongNetLM.load('x')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "ImportError: saving and loading need safetensors: pip install safetensors" in done.stderr
