"""Reading compiled programs, on lines as compilers write them."""

from pagedjax.hlo_text import Kernel, Program

TEXT = """
HloModule jit_step, is_scheduled=true

%copy_body (param_0.1: bf16[4,32,128]) -> bf16[4,32,128] {
  %param_0.1 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %copy.1 = bf16[4,32,128]{2,1,0:T(16,128)(2,1)} copy(%param_0.1), metadata={op_name="w"}
}

%add_body (param_0.2: bf16[4,32,128]) -> bf16[4,32,128] {
  %param_0.2 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %copy.2 = bf16[4,32,128]{2,1,0:T(16,128)(2,1)} copy(%param_0.2)
  ROOT %add.1 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} add(%copy.2, %copy.2)
}

ENTRY %main (w.1: bf16[4,32,128]) -> (bf16[4,32,128], f32[8,128]) {
  %w.1 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %fusion.1 = bf16[4,32,128]{2,1,0:T(16,128)(2,1)} fusion(%w.1), kind=kLoop, calls=%copy_body
  %fusion.2 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} fusion(%w.1), kind=kLoop, calls=%add_body
  %fusion.3 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} fusion(%w.1), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%copy_body
  %copy-start.1 = (bf16[4,32,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[4,32,128]{2,1,0:T(8,128)(2,1)}, \
u32[]{:S(2)}) copy-start(%w.1)
  %transpose.1 = bf16[128,4,32]{2,1,0:T(8,128)(2,1)} transpose(%w.1), dimensions={2,0,1}
  %copy.3 = bf16[128,128]{1,0:T(16,128)(2,1)} copy(%w.1)
  %attend.7 = f32[8,128]{1,0:T(8,128)} custom-call(%x.1), custom_call_target="tpu_custom_call", \
backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}],\
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"1024"}]}
  %other.2 = f32[8,128]{1,0} custom-call(%x.1), custom_call_target="mosaic_gpu_v2"
  %topk.1 = f32[8,128]{1,0} custom-call(%x.1), custom_call_target="TopK"
}
"""


def test_moves_are_what_writes_the_elements_elsewhere_and_computes_nothing():
    moves = {move.name: move for move in Program(TEXT).moves_of((4, 32, 128))}
    assert moves.keys() == {"fusion.1", "copy-start.1", "transpose.1", "copy.3"}
    assert not moves["copy-start.1"].main_memory
    assert not moves["copy-start.1"].relaid
    assert all(moves[name].main_memory and moves[name].relaid for name in ("fusion.1", "copy.3"))


def test_relaid_are_arrays_with_the_same_axes():
    relaid = Program(TEXT).relaid((4, 32, 128))
    assert [move.name for move in relaid] == ["fusion.1"]


def test_kernels_tell_what_they_use():
    assert Program(TEXT).kernels() == [
        Kernel("attend", "tpu_custom_call", 1024, 4096),
        Kernel("other", "mosaic_gpu_v2", None, None),
    ]
