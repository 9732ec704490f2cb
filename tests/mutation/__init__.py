# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Each guard switched off, and what then notices: a table that shows that no guard is there in vain."""
