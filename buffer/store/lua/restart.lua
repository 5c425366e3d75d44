-- Makes a learner the run's current one, at the step of its checkpoint: leased -> ready, and groups trained after that
-- step -> ready, even if a later checkpoint had made them durable. Groups still leased for a step within the checkpoint
-- were trained; Redis has lost that record. Steps within the checkpoint that the ledger has no record of count as
-- forgotten: Redis has lost them, or another learner has undone them.
-- Undone steps are to be repeated with the same groups (lease.lua), listed in `undone:<step>` up to the step `repeat_until`.
-- Bytes in spill files stay there until the group is leased again: those of all undone steps may exceed Redis's memory.
-- args: steps (in the checkpoint; later ones are undone), version (the checkpoint's), max_uses, seed, spill_bytes, learner.
-- Returns {groups returned to ready, undone steps of which durable groups were forgotten}, or 'superseded'.
-- A repeated hello has no effect: it must not take back what the learner has leased and trained since.
local done, learner = args.steps, args.learner
if redis.call('SADD', key('learners'), learner) == 0 then return check_learner(learner) or {0, 0} end
local meta = redis.call('HMGET', key('meta'), 'next_step', 'repeat_until')
local next_step = tonumber(meta[1] or 0)
local leased_steps = redis.call('ZCOUNT', key('leases'), next_step, done - 1)
redis.call('HSET', key('meta'), 'next_step', done, 'durable_steps', done, 'learner', learner,
  'repeat_until', math.max(next_step, tonumber(meta[2] or 0)), 'resumed_depth', depth_of(args.version))
finish_steps(done - 1, args.max_uses, args.seed)
local back = end_leases('the learner restarted')

for step = done, next_step - 1 do redis.call('DEL', key('undone:' .. step)) end

-- Takes back the uses of undone steps.
local undone = 0
local function undo(id)
  local known, last = redis.call('HMGET', key('about:' .. id), 'lengths', 'order', 'uses', 'row', 'tokens'), nil
  local lengths, uses = cjson.decode(known[1]), tonumber(known[3])
  while true do
    last = redis.call('LINDEX', key('steps:' .. id), -1)
    if not last or tonumber(last) < done then break end
    redis.call('RPOP', key('steps:' .. id))
    redis.call('ZADD', key('undone:' .. last), known[2], id)
    redis.call('HINCRBY', key('about:' .. id), 'uses', -1)
    add_lengths('trained', lengths, -1)
    uses = uses - 1
    if known[4] then add_uses(known[4], tonumber(known[5]), uses, -1) end
    count('uses', -1)
    count_rate(0, -1)
    undone = undone + 1
  end
  if last then redis.call('ZADD', key('used'), last, id) else redis.call('ZREM', key('used'), id) end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('used'), done, '+inf')) do undo(id) end
for _, state in ipairs({'trained', 'durable'}) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key(state), done, '+inf')) do
    if state == 'durable' then count('durable', -1) end
    count_rate(1, tonumber(field_of(id, 'uses')))
    undo(id)
    redis.call('HDEL', key('about:' .. id), 'exported')  -- the file lists the undone steps
    return_to_ready(id, 'undone: the learner restarted after ' .. done .. ' steps')
    back = back + 1
  end
end
redis.call('HDEL', key('meta'), 'finished')
-- These groups are in the pipeline again. The undone uses are the latest ones, so they are taken from those since the last
-- publication.
write_counts()
redis.call('HSET', key('meta'), 'consumed', math.max(0, tonumber(redis.call('HGET', key('meta'), 'consumed') or 0) - undone))
local forgotten = tonumber(redis.call('HGET', key('meta'), 'forgotten_step') or -1)
-- Later steps will be trained again, on groups that the ledger remembers.
local unrecorded = done - next_step > leased_steps
redis.call('HSET', key('meta'), 'forgotten_step', unrecorded and done - 1 or math.min(forgotten, done - 1))
return {back, math.max(0, forgotten + 1 - done)}
