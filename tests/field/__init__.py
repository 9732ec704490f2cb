# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What people met when they trained with CUDA graphs, each with its right value.

One file a kind of report, from A to N; a test names its report (F01 to F56). Each holds a replayed run against a native
one as bits, and says what has to be replayed or why it must be native. The same files run on tapes and on a GPU.
"""
