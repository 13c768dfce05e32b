"""Imported for its effect: loads the Keras that ``tf.keras`` stands for, which ``TF_USE_LEGACY_KERAS`` decides.

In the process that workers are forked from it is paid once for all of them.
"""

import tensorflow as tf

_ = tf.keras.layers
