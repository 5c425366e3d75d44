-- One slice of an evaluation has arrived. ARGV: ticket id, version, first task, tasks, sum of scores, the group's bytes.
-- Returns 'evaluated', 'duplicate' or 'void'. The bytes are kept until the next evaluation is asked for.
local id, eval = ARGV[1], key('eval:' .. ARGV[2])
local issued = key('eval_issued:' .. ARGV[2])
if redis.call('ZREM', issued, ARGV[3] .. ':' .. ARGV[4]) == 0 then
  if redis.call('SISMEMBER', eval .. ':groups', id) == 1 then return 'duplicate' end
  return 'void'
end
redis.call('SADD', eval .. ':groups', id)
redis.call('SET', key('group:' .. id), ARGV[6])
redis.call('HINCRBYFLOAT', eval, 'sum', ARGV[5])
local done = redis.call('HINCRBY', eval, 'done', ARGV[4])
if done >= tonumber(redis.call('HGET', eval, 'tasks')) then
  redis.call('HSET', eval, 'finished', now())
  redis.call('RPUSH', key('eval_reports'), ARGV[2])
end
return 'evaluated'
