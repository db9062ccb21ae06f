"""llama.cpp's own converter on a folder with the bundled tokenizer:

python benchmarks/engines/llama_cpp_convert.py LLAMA_CPP_SOURCE FOLDER OUT.gguf
"""

import sys

source, folder, output = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

import convert_hf_to_gguf  # noqa: E402
import transformers  # noqa: E402
from conversion import base, get_model_class  # noqa: E402

# It knows pre-tokenizers by what they make of a text, and not that of the bundled model, which some families' classes
# change besides; Phi-3 must have SentencePiece.
transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast
base.TextModel.get_vocab_base_pre = lambda model, tokenizer: "gpt-2"
hparams = base.ModelBase.load_hparams(base.Path(folder), False)
model_class = get_model_class(base.get_model_architecture(hparams, base.ModelType.TEXT), mmproj=False)
model_class.set_vocab = base.TextModel._set_vocab_gpt2

sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", output, "--outtype", "f32"]
convert_hf_to_gguf.main()
