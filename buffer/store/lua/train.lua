-- leased -> trained, for all groups of a step; with uses left: -> ready. What is still leased for an earlier step was trained
-- too: its learner was answered before it went on, and Redis has lost that since. ARGV: step (0-based), uses that a group
-- may have, seed. Returns how many groups.
local groups = settle(ARGV[1], ARGV[2], ARGV[3])
if groups > 0 then redis.call('HSET', key('meta'), 'next_step', ARGV[1] + 1) end
return groups
